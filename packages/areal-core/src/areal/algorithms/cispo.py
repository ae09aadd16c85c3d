"""CISPO: the ratio is a clipped weight without gradient, so that no token is silenced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat

from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.losses import weighted_logprob
from areal.algorithms.ratios import BehaviorMode, ratio
from areal.contracts.algorithm import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


class CispoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; `dual_clip` is not read."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 4.0
    """The weight is at most 1 + clip_high."""
    behavior_mode: BehaviorMode = "clamp"
    """``clamp``: a stale token's weight is bounded; dropping it would silence it."""


class Cispo(Grpo):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585).

    ``-sg(clip(r)) A log pi`` with ``r = pi / pi_proximal``.

    Invariant: a token with an advantage always has a gradient.
    """

    def __init__(self, options: CispoOptions | None = None) -> None:
        super().__init__(options or CispoOptions())

    def surrogate(self, logprobs: Tensor, old: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        options = self.options
        return weighted_logprob(
            ratio(logprobs, old),
            logprobs,
            batch.advantages,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
        )
