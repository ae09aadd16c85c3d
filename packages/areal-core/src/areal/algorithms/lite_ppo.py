"""Lite PPO: the group's mean as baseline, the step's standard deviation as scale, a mean over tokens."""

from __future__ import annotations

from typing import Literal

from areal.algorithms.grpo import Grpo, GrpoOptions


class LitePpoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ."""

    scale: Literal["group", "batch", "none"] = "batch"
    """``batch``: advantages of all the step's tokens are brought to mean 0 and standard deviation 1."""


class LitePpo(Grpo):
    """Two techniques on critic-free PPO (arXiv 2508.08221). Invariant: as `Grpo`."""

    def __init__(self, options: LitePpoOptions | None = None) -> None:
        super().__init__(options or LitePpoOptions())
