"""DPO on the run's own samples: of each group the best answer is preferred to the worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from areal.algorithms.policy import rewards_of
from areal.algorithms.ratios import log_ratio, sequence_mean, sequence_sum
from areal.contracts.algorithm import ACTOR_0, AlgorithmOptions, Needs, Ref, TokenBatch
from areal.contracts.messages import Group

if TYPE_CHECKING:
    from torch import Tensor


class DpoOptions(AlgorithmOptions):
    """Invariant: whatever the settings, a group without a better and a worse answer teaches nothing."""

    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference; smaller lets it go further."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """``sigmoid``: DPO's logistic loss; ``ipo``: the squared loss of IPO, which stops at a margin of 1 / (2 beta)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of preferences taken to be the wrong way round; read by ``sigmoid``."""
    ref: Ref = ACTOR_0
    """The reference policy: ``actor@0``, the run's own before its first step, or a Hugging Face folder or hub id."""

    @property
    def least_group_size(self) -> int:
        """Two make a pair."""
        return 2


class Dpo:
    """Direct preference optimisation (arXiv 2305.18290); as ``ipo`` with the loss of arXiv 2310.12036.

    ``-log sigmoid(beta m)``, mean over pairs, with ``m`` the log-likelihood that the better answer gained over the
    reference less what the worse one gained; sums over tokens, not means.

    Invariant: both answers of a pair are in one micro-batch, and a pair that has lost one side teaches nothing.
    """

    def __init__(self, options: DpoOptions | None = None) -> None:
        self.options = options or DpoOptions()
        self.needs = Needs(proximal=False, reference=self.options.ref, whole_groups=True)

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """Return 1 for the best trajectory, -1 for the worst, 0 for all others; the first of several equal ones."""
        rewards = rewards_of(group)
        known = {
            i: reward for i, reward in enumerate(rewards) if reward is not None and group.trajectories[i].num_tokens
        }
        signs = [0.0] * len(rewards)
        if known and min(known.values()) < max(known.values()):
            signs[max(known, key=known.__getitem__)] = 1.0
            signs[min(known, key=known.__getitem__)] = -1.0
        return signs

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        if batch.reference_logprobs is None:
            raise ValueError("the batch has no reference_logprobs; the trainer fills in what `needs` asks for")
        gained = sequence_sum(log_ratio(logprobs, batch.reference_logprobs), batch.sequence, batch.num_sequences)
        signs = sequence_mean(batch.advantages, batch.sequence, batch.num_sequences).sign()
        num_groups = int(batch.group.max()) + 1
        margin = sequence_sum(signs * gained, batch.group, num_groups)
        better, worse = (sequence_sum((signs == sign).to(signs.dtype), batch.group, num_groups) for sign in (1, -1))
        is_pair = (better > 0) & (worse > 0)
        losses = self._losses(margin)[is_pair]
        pairs = max(1, batch.computed_groups)
        statistics = {
            "preference_accuracy": (margin.detach()[is_pair] > 0).to(margin.dtype).sum() / pairs,
            "preference_margin": self.options.beta * margin.detach()[is_pair].sum() / pairs,
            "entropy": batch.entropy.detach().sum() / batch.computed_tokens,
        }
        return losses.sum() / pairs, statistics

    def _losses(self, margin: Tensor) -> Tensor:
        """Return the loss of each pair ([G]) from its margin ([G], nats)."""
        options = self.options
        if options.preference == "ipo":
            return (margin - 1 / (2 * options.beta)).square()
        from torch.nn.functional import logsigmoid

        smoothing, scaled = options.label_smoothing, options.beta * margin
        return -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)
