"""REINFORCE and REINFORCE++: the reward itself is the advantage, as it is or normalised over the step."""

from __future__ import annotations

from areal.algorithms.advantages import Baseline, Scale
from areal.algorithms.grpo import Grpo, GrpoOptions


class ReinforceOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ."""

    baseline: Baseline = "none"
    """``none``: the reward is the advantage."""
    scale: Scale = "none"
    """``none``: advantages are not divided by anything."""


class Reinforce(Grpo):
    """REINFORCE (Williams 1992); PPO's clip bounds the update on stale samples. Invariant: as `Grpo`."""

    def __init__(self, options: ReinforceOptions | None = None) -> None:
        super().__init__(options or ReinforceOptions())


class ReinforcePlusPlusOptions(ReinforceOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ. ``baseline: group_mean`` is REINFORCE++-baseline."""

    scale: Scale = "batch"
    """``batch``: advantages of all the step's tokens are brought to mean 0 and standard deviation 1."""


class ReinforcePlusPlus(Grpo):
    """REINFORCE++ (arXiv 2501.03262): advantages are normalised over the step, not within a group.

    Invariant: as `Grpo`.
    """

    def __init__(self, options: ReinforcePlusPlusOptions | None = None) -> None:
        super().__init__(options or ReinforcePlusPlusOptions())
