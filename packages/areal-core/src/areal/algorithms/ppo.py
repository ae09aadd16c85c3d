"""PPO with a critic: each token's advantage comes from a value model that learns beside the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, PositiveFloat, model_validator

from areal.algorithms.advantages import Baseline, Scale, generalized_advantages
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.losses import clipped_value_loss
from areal.contracts.algorithm import TokenBatch
from areal.contracts.messages import Row

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Field(ge=0, le=1)]


class PpoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; rewards are not compared within a group unless `baseline` says so."""

    baseline: Baseline = "none"
    """``none``: the critic is the baseline."""
    scale: Scale = "batch"
    """``batch``: advantages of all the step's tokens are brought to mean 0 and standard deviation 1."""
    gamma: Share = 1.0
    """Discount of a reward for each token that it comes later."""
    lam: Share = 0.95
    """GAE's lambda: 1 trusts the rewards, 0 trusts the critic."""
    value_clip: PositiveFloat | None = 0.2
    """Most that a value may learn to move in one step; null: no bound."""
    critic_learning_rate: PositiveFloat | None = None
    """Highest rate of the critic's schedule; null: ``training.learning_rate``."""

    @model_validator(mode="after")
    def _discounts_by_token(self) -> Self:
        if self.turn_discount != 1:
            raise ValueError("ppo discounts by token: set gamma, and leave turn_discount at 1")
        return self


class Ppo(Grpo):
    """Proximal policy optimisation (arXiv 1707.06347) with generalised advantages (GAE, arXiv 1506.02438).

    A trajectory's reward comes with the last trained token of each of its rows; a KL penalty in the reward comes
    with each token. Corrections for stale samples are GRPO's.

    Invariant: advantages and returns are from the critic before the step, whatever the number of mini-batches.
    """

    def __init__(self, options: PpoOptions | None = None) -> None:
        ppo = options or PpoOptions()
        super().__init__(ppo)
        self._gamma, self._lam = ppo.gamma, ppo.lam
        self.critic = ValueLoss(ppo.value_clip)
        self.critic_learning_rate = ppo.critic_learning_rate

    def refine(self, rows: Sequence[Row]) -> list[Row]:
        """Turn rewards and the critic's values into advantages and returns."""
        return self.scaled([self._estimated(row) for row in rows])

    def _estimated(self, row: Row) -> Row:
        if row.values is None:
            raise ValueError("a row has no values; the trainer fills them in for an algorithm with a critic")
        rewards = [-cost for cost in compress(self.kl_penalties(row), row.loss_mask)]
        if not rewards:
            return replace(row, returns=(0.0,) * len(row.token_ids))
        rewards[-1] += [*compress(row.advantages, row.loss_mask)][-1]
        values = [*compress(row.values, row.loss_mask)]
        estimated = generalized_advantages(rewards, values, gamma=self._gamma, lam=self._lam)
        advantages, returns = (_spread(numbers, row.loss_mask) for numbers in estimated)
        return replace(row, advantages=advantages, returns=returns)


class ValueLoss:
    """What the critic minimises: the mean over tokens of PPO's clipped value loss.

    Invariant: the policy's logprobs are not read.
    """

    def __init__(self, clip: float | None) -> None:
        self._clip = clip

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        values, old, returns = logprobs, batch.old_values, batch.returns
        if old is None or returns is None:
            raise ValueError("the batch has no values and returns; the trainer fills them in for a critic")
        losses, clipped = clipped_value_loss(values, old, returns, clip=self._clip)
        statistics = {"value": values.detach(), "clip_fraction": clipped.float()}
        means = {name: numbers.sum() / batch.computed_tokens for name, numbers in statistics.items()}
        return losses.sum() / batch.total_tokens, means


def _spread(numbers: Sequence[float], loss_mask: Sequence[bool]) -> tuple[float, ...]:
    """Return the numbers at the mask's True places and 0 elsewhere."""
    left = iter(numbers)
    return tuple(next(left) if trained else 0.0 for trained in loss_mask)
