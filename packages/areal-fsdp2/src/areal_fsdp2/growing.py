"""A run that has outgrown one device: the checkpoint of the backend `torch`, read by the ranks of this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.algorithms.update.state import load_state
from areal_fsdp2.boxes import Kinds
from areal_fsdp2.shards import regions_of
from areal_fsdp2.trained import MOMENTS

STATE_FILE = "trainer.pt"


class TorchCheckpoint:
    """Invariant: tensors have the names that they have in Hugging Face files; they are mapped, not read, at first."""

    def __init__(self, path: Path) -> None:
        """JournalError when the file is damaged."""
        saved = load_state(path, STATE_FILE, "torch", is_mapped=True)
        weights: dict[str, Tensor] = saved["weights"]
        self._tensors = {f"weights/{name}": part for name, part in _pieces(weights)}
        moments = _moments(weights, saved["optimizer"]["adam"])
        for kind in MOMENTS:
            found = {name: state[kind] for name, state in moments.items() if kind in state}
            self._tensors |= {f"{kind}/{name}": part for name, part in _pieces(found)}
        if saved.get("reference") is not None:
            kept = dict(zip(weights, saved["reference"], strict=True))
            self._tensors |= {f"reference/{name}": part for name, part in _pieces(kept)}
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}
        self.rest: dict[str, Any] = {
            "num_updates": saved["num_updates"],
            "random": [saved["random"]],
            "scale": _scale(saved["optimizer"]["scaler"]),
            "steps": {
                regions_of(name, tuple(weights[name].shape))[0].name: float(state["step"])
                for name, state in moments.items()
                if "step" in state
            },
        }

    @torch.no_grad()
    def read(self, kinds: Kinds) -> None:
        """Fill all parts."""
        for kind, parts in kinds.items():
            for part in parts:
                part.view.copy_(self._tensors[f"{kind}/{part.name}"][part.box])


def _pieces(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that Hugging Face files have in place of a module's parameters."""
    for name, parameter in parameters.items():
        for region in regions_of(name, tuple(parameter.shape)):
            piece = parameter[tuple(slice(low, low + size) for low, size in region.box)]
            for axis in region.index:
                piece = piece.squeeze(axis)
            yield region.name, piece


def _moments(weights: Mapping[str, Tensor], adam: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return Adam's state by the names of parameters; it numbers matrices first, then vectors."""
    names = [name for name, tensor in weights.items() if tensor.ndim > 1]
    names += [name for name, tensor in weights.items() if tensor.ndim <= 1]
    return {names[number]: state for number, state in adam["state"].items()}


def _scale(scaler: Mapping[str, float]) -> dict[str, float]:
    """Return the state of a loss scale; one that was off says nothing."""
    return {"value": scaler["scale"], "num_good": scaler["_growth_tracker"]} if scaler else {}
