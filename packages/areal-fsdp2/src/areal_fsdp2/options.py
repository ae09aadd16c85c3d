"""What a recipe may say about the backend, and which combinations can run; light, read with every recipe."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from areal.contracts.backend import DistributedOptions
from areal.contracts.specs import ModelSpec, TrainerDevices, TrainingSpec


class Fsdp2Options(DistributedOptions):
    """Invariant: the options change how the work is spread, never the update, beyond floating-point rounding."""

    tp: NonNegativeInt = 0
    """Ranks that hold slices of each layer; 0: what `resources.train.parallel` (or `parallel.other`) says."""
    sp: PositiveInt = 1
    """Ranks that hold parts of each sequence, exchanged around attention (Ulysses, arXiv 2309.14509)."""
    pp: NonNegativeInt = 0
    """Ranks that hold runs of layers; 0: what `resources.train.parallel` says."""
    ep: NonNegativeInt = 0
    """Ranks that share the experts of a layer out; 0: what `parallel.expert` says."""
    replicate: PositiveInt = 1
    """Copies of the sharded weights (hybrid sharding): each is sharded over data-parallel ranks / `replicate`."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""

    def problem(self, devices: TrainerDevices, model: ModelSpec, training: TrainingSpec) -> str:
        """Return why this cannot run, with the nearest values that can; empty: it can."""
        return ""
