"""GRPO: rewards compared within a group of samples, PPO's clipped objective, corrected for stale samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from areal.algorithms.advantages import group_advantages
from areal.algorithms.losses import clipped_surrogate
from areal.algorithms.ratios import behavior_weight, kl_estimate, ratio
from areal.contracts.algorithm import TokenBatch
from areal.contracts.messages import Group
from areal.contracts.options import Options

if TYPE_CHECKING:
    from torch import Tensor


class GrpoOptions(Options):
    """Invariant: with on-policy samples and no entropy bonus, every setting has the gradient of plain GRPO."""

    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation; false: by nothing (Dr. GRPO)."""
    std_floor: NonNegativeFloat = 0.0
    """Smallest standard deviation to divide by; it tames groups in which nearly all rewards are equal."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound, in units of the advantage, on the loss of tokens with negative advantage; null: none."""
    objective: Literal["decoupled", "naive"] = "decoupled"
    """``decoupled``: ratio to the policy before this step, and a weight for the sampler's policy; ``naive``: ratio
    to the sampler's policy."""
    behavior_cap: PositiveFloat = 5.0
    """Largest weight of a token in the decoupled objective."""
    behavior_mode: Literal["clamp", "mask"] = "mask"
    """What happens to a larger weight: kept at the cap, or the token is dropped."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus (nats per token)."""


class Grpo:
    """Group relative policy optimisation (arXiv 2402.03300) with the decoupled objective (arXiv 2505.24298).

    Loss: ``-(1/N) sum w min(r A, clip(r) A)``, N all trained tokens of the batch, dropped ones included;
    ``r = pi / pi_proximal``, ``w = pi_proximal / pi_behavior`` capped and without gradient.

    Invariant: a token with advantage 0 adds nothing to the gradient, unless there is an entropy bonus.
    """

    def __init__(self, options: GrpoOptions | None = None) -> None:
        self.options = options or GrpoOptions()
        self.needs_advantage = self.options.entropy_coefficient == 0

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """Return one advantage for each trajectory; failed ones get 0 and count in neither mean nor deviation."""
        rewards = [t.outcome.reward if t.outcome.status == "ok" else None for t in group.trajectories]
        options = self.options
        return group_advantages(rewards, normalize_std=options.normalize_std, std_floor=options.std_floor)

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        options = self.options
        weight = behavior_weight(
            batch.proximal_logprobs, batch.behavior_logprobs, cap=options.behavior_cap, mode=options.behavior_mode
        )
        decoupled = options.objective == "decoupled"
        losses, clipped = clipped_surrogate(
            ratio(logprobs, batch.proximal_logprobs if decoupled else batch.behavior_logprobs),
            batch.advantages,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
        )
        total = (weight * losses if decoupled else losses).sum() / batch.total_tokens
        if options.entropy_coefficient:
            total = total - options.entropy_coefficient * batch.entropy.sum() / batch.total_tokens
        statistics = {
            "clip_fraction": clipped.float(),
            "behavior_weight": weight,
            "behavior_kl": kl_estimate(batch.proximal_logprobs, batch.behavior_logprobs),
            "entropy": batch.entropy.detach(),
        }
        means = {name: values.sum() / batch.computed_tokens for name, values in statistics.items()}
        return total, means | {"behavior_weight_max": weight.max()}
