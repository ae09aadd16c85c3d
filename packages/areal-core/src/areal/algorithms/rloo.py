"""RLOO: every sample is compared with the mean of the others of its group."""

from __future__ import annotations

from areal.algorithms.advantages import Baseline, Scale
from areal.algorithms.grpo import Grpo, GrpoOptions


class RlooOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ."""

    baseline: Baseline = "leave_one_out"
    """``leave_one_out``: the mean of the group's other rewards."""
    scale: Scale = "none"
    """``none``: advantages are not divided by anything."""


class Rloo(Grpo):
    """REINFORCE leave-one-out (arXiv 2402.14740); PPO's clip bounds the update on stale samples.

    Invariant: as `Grpo`.
    """

    def __init__(self, options: RlooOptions | None = None) -> None:
        super().__init__(options or RlooOptions())
