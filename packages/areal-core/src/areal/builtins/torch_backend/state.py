"""What a checkpoint holds: an HF folder for everybody, and the exact state for going on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from areal.builtins.quiet import no_progress_bar
from areal.contracts.durable import sync
from areal.errors import JournalError, WorkerFailed

MODEL_FOLDER = "model"
STATE_FILE = "trainer.pt"


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model folder or hub id, or None when it has none."""
    folder = Path(path)
    # transformers would make up a tokenizer without vocabulary.
    if folder.is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab*")]:
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=folder.is_dir())
    except (OSError, ValueError, KeyError):
        return None


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


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write `state` (tensors and plain values) to the file `path`; it appears whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    torch.save(state, unfinished)
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)


def load_state(path: Path) -> dict[str, Any]:
    """Return what `save_state` wrote, its tensors on the CPU; JournalError when it is missing or damaged."""
    if not path.is_file():
        raise JournalError(
            f"{str(path.parent)!r} is not a checkpoint of the backend 'torch': it has no {path.name}; "
            "put the file back, or start a new run from an older checkpoint with model.path=CHECKPOINT/model"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, OSError) as error:  # nothing is wrong with the file
        raise WorkerFailed(f"{str(path)!r} cannot be read: {error or type(error).__name__}") from error
    except Exception as error:  # torch.load raises whatever its unpickler meets
        raise JournalError(f"{str(path)!r} is damaged ({error}); go on from an older checkpoint") from error


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
