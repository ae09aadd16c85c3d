"""DAPO: clip-higher, a mean over tokens, and a soft penalty for answers that are too long."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, model_validator

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
    dynamic_sampling: bool = True
    """Pass over groups whose rewards are all equal and sample others in their place, within limits."""

    @model_validator(mode="after")
    def _penalty_has_room_to_grow(self) -> Self:
        if self.overlong_limit and not 0 < self.overlong_buffer <= self.overlong_limit:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} must lie between 1 and overlong_limit {self.overlong_limit}"
            )
        return self


class Dapo(Grpo):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476). Invariant: as `Grpo`."""

    def __init__(self, options: DapoOptions | None = None) -> None:
        self._dapo = options or DapoOptions()
        super().__init__(self._dapo)

    def keep(self, group: Group) -> bool:
        """Whether the group can teach anything: not when its rewards, before penalties, are all equal."""
        known = [reward for reward in super().rewards(group) if reward is not None]
        return not self._dapo.dynamic_sampling or (len(known) > 1 and min(known) < max(known))

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
