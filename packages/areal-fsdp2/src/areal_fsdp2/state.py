"""A checkpoint: an HF folder for everybody, and beside it each rank's exact state for going on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from areal.errors import JournalError, WorkerFailed
from areal_fsdp2.model import PackedModel
from areal_fsdp2.shards import Shards

MODEL_FOLDER = "model"


def save_model(
    model: PackedModel, shards: Shards, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype, folder: Path
) -> None:
    """Write the HF folder `folder` with weights cast to `dtype`; it appears whole or not at all. All ranks call it."""
    unfinished, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    weights = {name: tensor.to(dtype).cpu() for name, tensor in shards.gathered()}
    if dist.get_rank() != 0:
        return
    for leftover in (unfinished, old):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
    config = model.module.config
    held, config.dtype = config.dtype, dtype
    config.architectures = [type(model.module).__name__]
    config.save_pretrained(unfinished)
    config.dtype = held
    if model.module.can_generate() and model.module.generation_config is not None:
        model.module.generation_config.save_pretrained(unfinished)
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    for file in (*unfinished.iterdir(), unfinished):
        _sync(file)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write `state` (tensors and plain values) to the file `path`; it appears whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    torch.save(state, unfinished)
    _sync(unfinished)
    unfinished.replace(path)
    _sync(path.parent)


def load_state(path: Path) -> dict[str, Any]:
    """Return what `save_state` wrote, its tensors on the CPU; JournalError when it is missing or damaged."""
    if not path.is_file():
        raise JournalError(
            f"{str(path.parent)!r} is not a checkpoint of the backend 'fsdp2' on this mesh: it has no {path.name}; "
            "put the file back, or start a new run from an older checkpoint with model.path=CHECKPOINT/model"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, OSError) as error:  # nothing is wrong with the file
        raise WorkerFailed(f"{str(path)!r} cannot be read: {error or type(error).__name__}") from error
    except Exception as error:  # torch.load raises whatever its unpickler meets
        raise JournalError(f"{str(path)!r} is damaged ({error}); go on from an older checkpoint") from error


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's random numbers on the CPU and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].cpu())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
