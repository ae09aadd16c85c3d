"""Why a checkpoint is not of the model that is trained: which tensor differs, and whether LoRA's settings do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]
"""Of the trained tensors, by their names in files."""


@dataclass(frozen=True, slots=True)
class Factors:
    """LoRA's settings as far as shapes tell them. Invariant: rank 0 is without LoRA, and then `targets` is empty."""

    rank: int
    targets: tuple[str, ...]

    def in_words(self, *, targets: bool) -> str:
        on = f" on {', '.join(self.targets)}" if targets else ""
        return f"LoRA of rank {self.rank}{on}" if self.rank else "no LoRA"

    def wish(self, *, targets: bool) -> str:
        """Return what to do for having them."""
        on = f" and target_modules [{', '.join(self.targets)}]" if targets else ""
        return f"set backend.lora back to rank {self.rank}{on}" if self.rank else "leave backend.lora out"


def mismatch(saved: Shapes, own: Shapes, model: str) -> str:
    """Say what a checkpoint has other than the trainer of `model`, and what to do; empty: nothing."""
    if saved == own:
        return ""
    name = next(name for name in (*own, *saved) if saved.get(name) != own.get(name))
    problem = _problem(name, saved.get(name), own.get(name), f"the trainer of {model!r}")
    there, here = _factors(saved), _factors(own)
    if there == here:
        return f"{problem}; set model.path back to the model of the checkpoint, or start a new run"
    differ = there.targets != here.targets
    return (
        f"{problem}, because the checkpoint has {there.in_words(targets=differ)} and the trainer "
        f"{here.in_words(targets=differ)}; {there.wish(targets=differ)} as in the checkpoint, or start a new run"
    )


def other_alpha(saved: float, own: float) -> str:
    """Say that a checkpoint's factors count for another alpha; empty: they do not."""
    if saved == own:
        return ""
    return (
        f"has LoRA factors for alpha {saved:g} and the trainer's is {own:g}; set backend.lora back to alpha {saved:g} "
        "as in the checkpoint, or start a new run"
    )


def _problem(name: str, saved: Sequence[int] | None, own: Sequence[int] | None, trainer: str) -> str:
    if saved is None:
        return f"has no tensor {name}, which {trainer} has"
    if own is None:
        return f"has a tensor {name}, which {trainer} does not have"
    return f"has {name} of shape {_written(saved)}, which is {_written(own)} in {trainer}"


def _factors(shapes: Shapes) -> Factors:
    """Return what the first factors say: they have a row for each unit of the rank."""
    found = {name.partition(".lora_A.")[0]: shape[0] for name, shape in shapes.items() if ".lora_A." in name}
    targets = {layer.rpartition(".")[2] for layer in found}
    return Factors(rank=max(found.values(), default=0), targets=tuple(sorted(targets)))


def _written(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"
