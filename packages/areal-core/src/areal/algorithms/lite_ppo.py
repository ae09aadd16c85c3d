"""Lite PPO: the group's mean as baseline, the step's standard deviation as scale, a mean over tokens."""

from __future__ import annotations

from areal.algorithms.advantages import Scale
from areal.algorithms.grpo import Grpo, GrpoOptions


class LitePpoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ."""

    scale: Scale = "batch_std"
    """``batch_std``: advantages are divided by the standard deviation of all the step's tokens."""


class LitePpo(Grpo):
    """Two techniques on critic-free PPO (arXiv 2508.08221). Invariant: as `Grpo`."""

    def __init__(self, options: LitePpoOptions | None = None) -> None:
        super().__init__(options or LitePpoOptions())
