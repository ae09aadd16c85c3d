"""LoRA (Hu et al., arXiv 2106.09685) with PEFT: the weights of the folder stay as they are, small factors are trained.

Names are those of files: a layer's own weight is called as without LoRA, factors as PEFT calls them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal.contracts.transfer import Adapter, Piece
from areal.errors import WorkerFailed, did_you_mean
from areal_fsdp2.options import LoraOptions
from areal_fsdp2.shards import ADAPTER_PREFIX, Part, Shards, local, parts_of_parameter, regions_of


def inject(module: PreTrainedModel, options: LoraOptions, trained: Collection[str]) -> None:
    """Give the target modules factors on the device meta; of all other parameters only `trained` learn.

    WorkerFailed when the model has no such modules.
    """
    from peft import inject_adapter_in_model

    head = module.get_output_embeddings()
    known = {
        name.rpartition(".")[2]
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        if part is not head and name not in {other.rpartition(".")[0] for other in trained}
    }
    for target in options.target_modules:
        if target not in known:
            raise WorkerFailed(
                f"lora.target_modules has {target!r} and {type(module).__name__} has the linear layers "
                f"{', '.join(sorted(known))}{did_you_mean(target, known)}"
            )
    inject_adapter_in_model(_config(options), module, low_cpu_mem_usage=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(regions_of(name, tuple(parameter.shape))[0].name) or name in trained)


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Set factors as PEFT does: A at random, B to 0. The same for every mesh: each rank takes its part of the whole."""
    for name, parameter in module.named_parameters():
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            for part in parts_of_parameter(name, parameter):
                part.view.copy_(whole[part.box])
        elif ".lora_B." in name:
            local(parameter).zero_()


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name, as in files, is a factor."""
    return name.startswith(ADAPTER_PREFIX)


class Merged(Shards):
    """What the weights would be with the factors in them. Invariant: only factors are ever gathered whole."""

    def __init__(self, parts: Sequence[Part], dtype: str, module: nn.Module, scale: float) -> None:
        """`parts`: of the weights, without factors."""
        super().__init__(parts, dtype)
        self._scale = scale
        self._factors: dict[str, list[Tensor]] = {}
        for name, parameter in module.named_parameters():
            layer, factor, _ = name.rpartition(".lora_A." if ".lora_A." in name else ".lora_B.")
            if factor:
                self._factors.setdefault(f"{layer}.weight", []).append(parameter)
        self._whole: dict[str, list[Tensor]] = {}

    def own(self) -> Iterator[tuple[str, Tensor]]:
        """As `Shards.own`; all ranks must go through it."""
        return self._merged(super().own())

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        return self._merged(super().gathered())

    @torch.no_grad()
    def view(self, piece: Piece) -> Tensor:
        weight, factors = super().view(piece), self._whole.get(self.tensors[piece.tensor].name)
        if factors is None:
            return weight
        (a, b), (rows, columns) = factors, piece.box
        return weight + self._scale * (b[rows] @ a[:, columns])

    def _merged(self, pieces: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what `pieces` does, while the factors are here whole."""
        try:
            for name, factors in self._factors.items():
                self._whole[name] = [_whole(factor) for factor in factors]
            yield from pieces
        finally:
            self._whole = {}


class Adapters:
    """The two forms of what is trained. Invariant: both are made of the same memory, the module's."""

    def __init__(self, module: nn.Module, parts: Sequence[Part], options: LoraOptions, dtype: str) -> None:
        """`parts`: all of the rank's."""
        self._options = options
        self.merged = Merged(
            [part for part in parts if not is_adapter(part.name)], dtype, module, options.alpha / options.rank
        )
        self.alone = Shards([part for part in parts if is_adapter(part.name)], dtype)

    @property
    def published(self) -> Shards:
        """What engines get."""
        return self.merged if self._options.publish == "merged" else self.alone

    @property
    def adapter(self) -> Adapter | None:
        """What engines are told about factors that they get alone."""
        if self._options.publish == "merged":
            return None
        return Adapter(rank=self._options.rank, alpha=self._options.alpha, target_modules=self._options.target_modules)

    def describe(self, folder: Path, base: str) -> None:
        """Write PEFT's configuration; `base`: the model below."""
        _config(self._options, base_model_name_or_path=base, inference_mode=True).save_pretrained(folder)


def _config(options: LoraOptions, **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]
        target_modules=list(options.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        **more,
    )


def _whole(factor: Tensor) -> Tensor:
    return factor.full_tensor() if isinstance(factor, DTensor) else factor.detach()
