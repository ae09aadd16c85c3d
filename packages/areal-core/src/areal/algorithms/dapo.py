"""DAPO: clip-higher, a mean over tokens, and a soft penalty for answers that are too long."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt

from areal.algorithms.advantages import overlong_penalty
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.contracts.messages import Group


class DapoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; without `overlong_limit` rewards are the environment's."""

    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped above 1 + clip_high: wider than below, so that rare tokens can become likely."""
    overlong_limit: NonNegativeInt = 0
    """Sampled tokens at which the penalty is full, usually ``sampling.max_new_tokens``; 0: no penalty."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before the limit over which the penalty grows from 0."""
    overlong_factor: NonNegativeFloat = 1.0
    """The full penalty, taken off the reward."""


class Dapo(Grpo):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476). Invariant: as `Grpo`."""

    def __init__(self, options: DapoOptions | None = None) -> None:
        self._dapo = options or DapoOptions()
        super().__init__(self._dapo)

    def rewards(self, group: Group) -> list[float | None]:
        """Return each sample's reward less its penalty for length, None for one that failed."""
        options, rewards = self._dapo, super().rewards(group)
        if not options.overlong_limit:
            return rewards
        penalties = (
            overlong_penalty(t.num_tokens, limit=options.overlong_limit, buffer=options.overlong_buffer)
            for t in group.trajectories
        )
        return [
            None if reward is None else reward + options.overlong_factor * penalty
            for reward, penalty in zip(rewards, penalties, strict=True)
        ]
