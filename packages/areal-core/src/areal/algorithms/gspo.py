"""GSPO: ratio and clip belong to the whole answer, as its reward does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat

from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.losses import clipped_surrogate
from areal.algorithms.policy import Aggregation
from areal.algorithms.ratios import BehaviorLevel, log_ratio, sequence_mean
from areal.contracts.algorithm import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


class GspoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """A sequence's ratio is clipped below 1 - clip_low; it is a geometric mean and so stays close to 1."""
    clip_high: NonNegativeFloat = 4e-4
    """A sequence's ratio is clipped above 1 + clip_high."""
    aggregation: Aggregation = "sequence_mean"
    """``sequence_mean``: every sequence counts the same."""
    behavior_level: BehaviorLevel = "geometric"
    """``geometric``: the correction for stale samples is a sequence's geometric mean, too."""


class Gspo(Grpo):
    """Group sequence policy optimisation (arXiv 2507.18071).

    ``-min(s A, clip(s) A)`` for each sequence with ``s = exp(mean over its tokens of log pi - log pi_proximal)``.

    Invariant: all tokens of a sequence have one ratio and are clipped together.
    """

    def __init__(self, options: GspoOptions | None = None) -> None:
        super().__init__(options or GspoOptions())

    def surrogate(self, logprobs: Tensor, old: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        options = self.options
        mean = sequence_mean(log_ratio(logprobs, old), batch.sequence, batch.num_sequences)
        return clipped_surrogate(
            mean.exp()[batch.sequence],
            batch.advantages,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
        )
