"""What every backend keeps in files of its own: the exact state for going on, and the tokenizer that goes along."""

from __future__ import annotations

from errno import EINVAL
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal.contracts.durable import sync
from areal.errors import JournalError, WorkerFailed, first_line


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model folder or hub id, or None when it has none."""
    folder = Path(path)
    # transformers would make up a tokenizer without vocabulary.
    if folder.is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab*")]:
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=folder.is_dir())
    except (OSError, ValueError, KeyError):
        return None


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write `state` (tensors and plain values) to the file `path`; it appears whole or not at all. OSError."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:  # given a path, torch.save hides what the disk says
        torch.save(state, file)
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)


def load_state(folder: Path, name: str, backend: str, *, is_mapped: bool = False) -> dict[str, Any]:
    """Return what `save_state` wrote to the file `name` of a checkpoint, its tensors on the CPU.

    `backend`: whose checkpoint it must be; `is_mapped`: what nobody looks at is not read. JournalError when the file is
    missing or damaged, WorkerFailed when it cannot be read although nothing is wrong with it.
    """
    path = folder / name
    if not path.is_file():
        raise JournalError(
            f"{str(folder)!r} is not a checkpoint of the backend {backend!r}: it has no {name}; put the file back, or "
            "start a new run from an older checkpoint with model.path=CHECKPOINT/model"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # torch.load raises whatever its unpickler meets
        # In a file cut short it seeks to before the beginning; with other such errors nothing is wrong with the file.
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != EINVAL):
            raise WorkerFailed(f"{str(path)!r} cannot be read: {error or type(error).__name__}") from error
        raise JournalError(f"{str(path)!r} is damaged ({first_line(error)}); go on from an older checkpoint") from error
