"""GRPO: rewards compared within a group of samples, PPO's clipped objective, corrected for stale samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat

from areal.algorithms.advantages import Baseline, Scale, discounted_turns, group_advantages
from areal.algorithms.losses import clipped_surrogate
from areal.algorithms.policy import PolicyGradient, PolicyOptions, normalized_rows, rewards_of
from areal.algorithms.ratios import ratio
from areal.contracts.algorithm import TokenBatch
from areal.contracts.messages import Group, Row

if TYPE_CHECKING:
    from torch import Tensor


class GrpoOptions(PolicyOptions):
    """Invariant: with on-policy samples, no entropy bonus and no KL, no setting of ratios changes the gradient."""

    baseline: Baseline = "group_mean"
    """What a reward is compared with: the group's mean, the mean of the group's others, or nothing."""
    scale: Scale = "group"
    """``group``: divided by the standard deviation of the group's rewards; ``batch``: the step's tokens are brought
    to mean 0 and standard deviation 1; ``batch_std``: divided by the step's deviation only; ``none``: left alone."""
    std_floor: NonNegativeFloat = 0.0
    """Smallest standard deviation of a group to divide by; it tames groups with nearly equal rewards."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each turn of a conversation has this times the advantage of the turn after it; 1: all have the same."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound, in units of the advantage, on the loss of tokens with negative advantage; null: none."""

    @property
    def least_group_size(self) -> int:
        """A baseline within the group needs somebody to compare with."""
        return 1 if self.baseline == "none" else 2


class Grpo(PolicyGradient):
    """Group relative policy optimisation (arXiv 2402.03300) with the decoupled objective (arXiv 2505.24298).

    Loss: ``-(1/N) sum w min(r A, clip(r) A)``, N all trained tokens of the batch, dropped ones included;
    ``r = pi / pi_proximal``, ``w = pi_proximal / pi_behavior`` capped and without gradient.

    Invariant: a token with advantage 0 adds nothing to the gradient, unless there is an entropy bonus or a KL term.
    """

    def __init__(self, options: GrpoOptions | None = None) -> None:
        self.options = options or GrpoOptions()
        super().__init__(self.options)

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """Return one advantage for each trajectory; failed ones get 0 and count in neither mean nor deviation.

        With a turn discount there is one for each sampled token.
        """
        options = self.options
        advantages = group_advantages(
            self.rewards(group),
            baseline=options.baseline,
            divide_by_std=options.scale == "group",
            std_floor=options.std_floor,
        )
        if options.turn_discount == 1:
            return advantages
        return [
            discounted_turns(advantage, [len(turn.token_ids) for turn in trajectory.turns], options.turn_discount)
            for advantage, trajectory in zip(advantages, group.trajectories, strict=True)
        ]

    def rewards(self, group: Group) -> list[float | None]:
        """Return each sample's reward, None for one that failed."""
        return rewards_of(group)

    def refine(self, rows: Sequence[Row]) -> list[Row]:
        """Take penalties off, then compare the advantages of a whole step, if options ask for it."""
        return self.scaled(super().refine(rows))

    def scaled(self, rows: list[Row]) -> list[Row]:
        """Return the rows with their advantages over the whole step's deviation, if `scale` says so."""
        scale = self.options.scale
        return normalized_rows(rows, center=scale == "batch") if scale in ("batch", "batch_std") else rows

    def surrogate(self, logprobs: Tensor, old: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        options = self.options
        return clipped_surrogate(
            ratio(logprobs, old),
            batch.advantages,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
        )
