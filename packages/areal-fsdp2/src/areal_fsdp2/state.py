"""What of a checkpoint is no tensor: the files beside weights, counts, random numbers."""

from __future__ import annotations

from errno import EINVAL
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal.contracts.durable import sync
from areal.errors import JournalError, WorkerFailed, first_line
from areal_fsdp2.model import PackedModel


def describe(model: PackedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype, folder: Path) -> None:
    """Write what a Hugging Face folder has beside weights; `dtype` is theirs."""
    config = model.module.config
    held, config.dtype = config.dtype, dtype
    config.architectures = [type(model.module).__name__]
    config.save_pretrained(folder)
    config.dtype = held
    if model.module.can_generate() and model.module.generation_config is not None:
        model.module.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write `state` (plain values, small tensors) to the file `path`; it appears whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    memory = BytesIO()  # torch.save hides what the disk says
    torch.save(state, memory)
    unfinished.write_bytes(memory.getbuffer())
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)


def load_state(path: Path, *, is_mapped: bool = False) -> dict[str, Any]:
    """Return what `save_state` wrote, its tensors on the CPU; JournalError when it is missing or damaged.

    `is_mapped`: what nobody looks at is not read.
    """
    if not path.is_file():
        raise JournalError(
            f"{str(path.parent.parent)!r} is not a checkpoint of the backend 'fsdp2': it has no "
            f"{path.parent.name}/{path.name}; put the file back, or start a new run from an older checkpoint with "
            "model.path=CHECKPOINT/model"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # torch.load raises whatever its unpickler meets
        # In a file cut short it seeks to before the beginning; with other such errors nothing is wrong with the file.
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != EINVAL):
            raise WorkerFailed(f"{str(path)!r} cannot be read: {error or type(error).__name__}") from error
        raise JournalError(f"{str(path)!r} is damaged ({first_line(error)}); go on from an older checkpoint") from error
