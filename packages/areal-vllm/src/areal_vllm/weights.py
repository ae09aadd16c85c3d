"""Loading weights in vLLM's worker processes, and reading back what they really run with."""

# pyright: reportMissingImports=false
# vLLM has an environment of its own.
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TRANSFER_BACKEND = "areal"
"""Name under which vLLM's own weight transfer API knows AReaL's way of loading."""
_PROBE_ROWS = 512
"""Unit vectors per pass when a packed matrix is read back."""


def tensors_of(update_info: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return an update's tensors by HF name: ``tensors`` in this process, or ``path`` of a file that torch saved."""
    if update_info.get("tensors") is not None:
        return dict(update_info["tensors"])
    return torch.load(update_info["path"], mmap=True, weights_only=True)


def pack_tied_heads(model: nn.Module) -> None:
    """Pack tied LM heads anew on a CPU, where each keeps a packed copy of the embedding's weight."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    modules: Iterator[Any] = model.modules()
    for module in modules:
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def compare_loaded(worker: Any, update_info: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many tensors of an update could be read back on this rank, and the names of those that differ.

    vLLM fuses, slices and (on a CPU) packs weights. Fused and sliced ones are put together from what was sent; packed
    ones are read by multiplying with unit vectors, which is exact: each sum has one term that is not 0. What vLLM
    quantises, or lays out in a way not known here, is not compared.
    """
    sent = tensors_of(update_info)
    model = worker.model_runner.get_model()
    rank, size = worker.rank % worker.parallel_config.tensor_parallel_size, worker.parallel_config.tensor_parallel_size
    tied = getattr(worker.model_config.hf_config, "tie_word_embeddings", False)
    compared, different = 0, []
    for names, held in _held(model, sent, tied):
        parts = [sent[name].to(held.dtype) for name in names]
        expected = _slice_as(parts, held.shape, rank, size)
        if expected is None:
            continue
        compared += len(names)
        if not torch.equal(held.cpu(), expected.cpu()):
            different += names
    return compared, different


def _held(model: nn.Module, sent: Mapping[str, Tensor], tied: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Yield what a model runs with, as [*] tensors, and the names of the sent tensors that each is made of."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            parent, _, last = path.rpartition(".")
            modules = [f"{parent}.{part}" for part in packed[last]] if last in packed else [path]
            names = [f"{part}.{name}" for part in modules]
            if tied and last == "lm_head" and names[0] not in sent:
                names = [next((key for key in sent if key.endswith("embed_tokens.weight")), names[0])]
            if not all(key in sent for key in names):
                continue
            if name == "weight" and hasattr(module, "cpu_linear"):
                yield names, _unpacked(module, [sent[key] for key in names])
            elif parameter.numel():
                yield names, parameter.data


@torch.inference_mode()
def _unpacked(module: Any, sent: list[Tensor]) -> Tensor:
    """Return the [out, in] matrix that a module multiplies with on a CPU."""
    width = getattr(module, "input_size_per_partition", None) or sent[0].shape[1]
    dtype = sent[0].dtype
    rows: list[Tensor] = []
    for first in range(0, width, _PROBE_ROWS):
        units = torch.zeros(min(_PROBE_ROWS, width - first), width, dtype=dtype)
        units[range(len(units)), range(first, first + len(units))] = 1
        rows.append(module.cpu_linear(units, module.weight, None))
    return torch.cat(rows).T


def _slice_as(parts: list[Tensor], shape: torch.Size, rank: int, size: int) -> Tensor | None:
    """Return this rank's share of the parts, put together to `shape`, or None when that is not how they are laid out.

    vLLM pads a vocabulary: then only the rows that were sent are in the result, and `shape` is longer.
    """
    whole = torch.cat(parts)
    if whole.shape == shape:
        return whole
    if size == 1:
        return None
    if len({len(part) % size for part in parts}) == 1:
        columns = torch.cat([part.chunk(size, dim=0)[rank] for part in parts])
        if columns.shape == shape:
            return columns
    if whole.dim() == 2 and len(parts) == 1 and whole.shape[1] % size == 0:
        rows = whole.chunk(size, dim=1)[rank]
        if rows.shape == shape:
            return rows
    return None
