"""The Hugging Face folder of a checkpoint, for everybody; beside it lies the exact state for going on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal.builtins.quiet import no_progress_bar
from areal.contracts.durable import sync

MODEL_FOLDER = "model"
STATE_FILE = "trainer.pt"


def save_model(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype, folder: Path
) -> None:
    """Write the HF folder `folder` with weights cast to `dtype`; it appears whole or not at all."""

    def write(unfinished: Path) -> None:
        with no_progress_bar():
            module.save_pretrained(unfinished, state_dict=_cast(module, dtype))
        # save_pretrained notes the dtype of the module, not of what it wrote.
        written, module.config.dtype = module.config.dtype, dtype
        module.config.save_pretrained(unfinished)
        module.config.dtype = written
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)

    _replace_folder(folder, write)


def _cast(module: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state with floating tensors in `dtype`; tied ones stay one tensor, so that they are written once."""
    done: dict[int, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            done[id(tensor)] = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        weights[name] = done[id(tensor)]
    return weights


def _replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    unfinished, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    for leftover in (unfinished, old):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    for file in unfinished.iterdir():
        sync(file)
    sync(unfinished)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
