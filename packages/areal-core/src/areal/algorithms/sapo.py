"""SAPO: a smooth gate in the place of the clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.losses import soft_gate
from areal.algorithms.policy import Aggregation, Objective
from areal.algorithms.ratios import ratio
from areal.contracts.algorithm import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


class SapoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; `clip_low`, `clip_high` and `dual_clip` are not read."""

    objective: Objective = "naive"
    """``naive``: the ratio is to the sampler's policy; the gate takes the place of the correction."""
    aggregation: Aggregation = "sequence_mean"
    """``sequence_mean``: every sequence counts the same."""
    temperature_positive: PositiveFloat = 1.0
    """Sharpness of the gate where the advantage is above 0."""
    temperature_negative: PositiveFloat = 1.05
    """Sharpness of the gate elsewhere; larger fades faster."""


class Sapo(Grpo):
    """Soft adaptive policy optimisation (arXiv 2511.20347): ``-(4 / t) sigmoid(t (r - 1)) A``.

    Invariant: the gradient is continuous in the ratio.
    """

    def __init__(self, options: SapoOptions | None = None) -> None:
        self._sapo = options or SapoOptions()
        super().__init__(self._sapo)

    def surrogate(self, logprobs: Tensor, old: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        options = self._sapo
        losses = soft_gate(
            ratio(logprobs, old),
            batch.advantages,
            positive=options.temperature_positive,
            negative=options.temperature_negative,
        )
        return losses, losses.new_zeros(losses.shape).bool()  # nothing is ever clipped
