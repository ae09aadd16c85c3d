"""What policy-gradient algorithms share: correction for stale samples, the mean over tokens, entropy bonus, report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from areal.algorithms.advantages import normalized
from areal.algorithms.ratios import (
    BehaviorLevel,
    BehaviorMode,
    KlEstimator,
    behavior_weight,
    interpolated,
    kl_estimate,
    sequence_mean,
)
from areal.contracts.algorithm import ACTOR_0, AlgorithmOptions, Needs, Ref, TokenBatch
from areal.contracts.messages import Group, Row

if TYPE_CHECKING:
    from torch import Tensor


Objective = Literal["decoupled", "naive"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
Proximal = Literal["recompute", "loglinear"]
KlPlace = Literal["loss", "reward"]


class PolicyOptions(AlgorithmOptions):
    """Invariant: with on-policy samples, no entropy bonus and no KL, no correction setting changes the gradient."""

    objective: Objective = "decoupled"
    """``decoupled``: ratio to the policy before this step, and a weight for the sampler's policy; ``naive``: ratio
    to the sampler's policy."""
    proximal: Proximal = "recompute"
    """The policy before this step, when there are several mini-batches: ``recompute`` takes a forward pass,
    ``loglinear`` interpolates between the sampler's policy and the current one by versions."""
    behavior_level: BehaviorLevel = "token"
    """What the weight of the decoupled objective is of: each token, a whole sequence (the product over its tokens),
    or a sequence's geometric mean."""
    behavior_cap: PositiveFloat = 5.0
    """Largest weight in the decoupled objective."""
    behavior_floor: NonNegativeFloat = 0.0
    """Smallest weight in the decoupled objective."""
    behavior_mode: BehaviorMode = "mask"
    """What happens to a weight beyond cap or floor: kept at the bound, or its tokens are dropped."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``: every token of the batch counts the same; ``sequence_mean``: every sequence does;
    ``fixed_length``: a sequence's sum over `fixed_length`, so that long sequences weigh more and none is rescaled."""
    fixed_length: PositiveInt = 1024
    """Tokens; read by ``fixed_length`` only, usually ``sampling.max_new_tokens``."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus (nats per token)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference policy (nats per token); 0: there is no reference."""
    kl_estimator: KlEstimator | None = None
    """How a token's divergence is estimated; null: k1 in the reward, k3 in the loss. Only k1 in the reward, k2 and k3
    in the loss have (near the reference) the divergence's gradient."""
    kl_in: KlPlace = "loss"
    """``loss``: added to each token's loss; ``reward``: taken off the advantages of a token and all before it (off
    its reward, where there is a critic)."""
    ref: Ref = ACTOR_0
    """The reference policy: ``actor@0``, the run's own before its first step, or a Hugging Face folder or hub id."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.behavior_floor > self.behavior_cap:
            raise ValueError(f"behavior_floor {self.behavior_floor:g} is above behavior_cap {self.behavior_cap:g}")
        return self


class PolicyGradient(ABC):
    """Loss ``aggregate(weight * surrogate + kl_coefficient * KL) - entropy_coefficient * mean entropy``.

    The weight is that of the decoupled objective (arXiv 2505.24298), without gradient. An algorithm says what its
    advantages and its surrogate are.

    Invariant: a token with advantage 0 adds nothing to the gradient, unless there is an entropy bonus or a KL term.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self.policy_options = options
        self._kl_in_loss = options.kl_coefficient > 0 and options.kl_in == "loss"
        self._kl_in_reward = options.kl_coefficient > 0 and options.kl_in == "reward"
        self._kl_estimator: KlEstimator = options.kl_estimator or ("k1" if self._kl_in_reward else "k3")
        self.needs = Needs(
            advantage=options.entropy_coefficient == 0 and not self._kl_in_loss,
            proximal=options.objective == "decoupled" and options.proximal == "recompute",
            reference=options.ref if options.kl_coefficient else "",
        )

    @abstractmethod
    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """See `areal.contracts.algorithm.Algorithm`."""

    @abstractmethod
    def surrogate(self, logprobs: Tensor, old: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return each token's loss ([N], with gradient) and where a clip changed it ([N] bool).

        `logprobs`: [N] of the current policy; `old`: [N] of the policy that the ratio is taken to.
        """

    def refine(self, rows: Sequence[Row]) -> list[Row]:
        """Take the divergence from the reference off the rewards, if it belongs there.

        Each token's advantage loses the penalties of its own and all later tokens of the row (as in REINFORCE++,
        arXiv 2501.03262).
        """
        if not self._kl_in_reward:
            return list(rows)
        return [replace(row, advantages=_less_later(row, self.kl_penalties(row))) for row in rows]

    def kl_penalties(self, row: Row) -> list[float]:
        """Return what each token's divergence from the reference costs ([T], 0 where the mask is False)."""
        if not self._kl_in_reward:
            return [0.0] * len(row.token_ids)
        import torch

        if row.reference_logprobs is None:
            raise ValueError("a row has no reference_logprobs; the trainer fills in what `needs` asks for")
        sampled, reference = (torch.tensor(x, dtype=torch.float64) for x in (row.logprobs, row.reference_logprobs))
        costs = self.policy_options.kl_coefficient * kl_estimate(reference, sampled, self._kl_estimator)
        return (costs * torch.tensor(row.loss_mask)).tolist()

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        options = self.policy_options
        proximal = batch.proximal_logprobs
        if options.proximal == "loglinear" and not batch.first_update:
            proximal = interpolated(logprobs, batch.behavior_logprobs, batch.versions, batch.version)
        weight = behavior_weight(
            proximal,
            batch.behavior_logprobs,
            cap=options.behavior_cap,
            floor=options.behavior_floor,
            mode=options.behavior_mode,
            level=options.behavior_level,
            sequence=batch.sequence,
            num_sequences=batch.num_sequences,
        )
        decoupled = options.objective == "decoupled"
        losses, clipped = self.surrogate(logprobs, proximal if decoupled else batch.behavior_logprobs, batch)
        if decoupled:
            losses = weight * losses
        statistics = {
            "clip_fraction": clipped.float(),
            "behavior_weight": weight,
            "behavior_dropped": (weight == 0).float(),
            "behavior_kl": kl_estimate(batch.proximal_logprobs, batch.behavior_logprobs),
            "entropy": batch.entropy.detach(),
        }
        if batch.reference_logprobs is not None:
            divergence = kl_estimate(batch.reference_logprobs, logprobs, self._kl_estimator)
            statistics["reference_kl"] = divergence.detach()
            if self._kl_in_loss:
                losses = losses + options.kl_coefficient * divergence
        total = aggregate(losses, batch, options)
        if options.entropy_coefficient:
            total = total - options.entropy_coefficient * batch.entropy.sum() / batch.total_tokens
        means = {name: values.sum() / batch.computed_tokens for name, values in statistics.items()}
        return total, means | {"behavior_weight_max": weight.max()}


def _less_later(row: Row, penalties: Sequence[float]) -> tuple[float, ...]:
    """Return each trained token's advantage less the sum of the penalties from there on."""
    later = list(accumulate(reversed(penalties)))[::-1]
    return tuple(
        advantage - cost if trained else 0.0
        for advantage, cost, trained in zip(row.advantages, later, row.loss_mask, strict=True)
    )


def aggregate(losses: Tensor, batch: TokenBatch, options: PolicyOptions) -> Tensor:
    """Return this micro-batch's share (scalar) of the mean of token losses ([N]), as `options.aggregation` says.

    The divisors are the whole batch's, so shares of any packing add up to the same number.
    """
    if options.aggregation == "token_mean":
        return losses.sum() / batch.total_tokens
    if options.aggregation == "fixed_length":
        return losses.sum() / (options.fixed_length * batch.total_sequences)
    return sequence_mean(losses, batch.sequence, batch.num_sequences).sum() / batch.total_sequences


def rewards_of(group: Group) -> list[float | None]:
    """Return each sample's reward, None for one that failed."""
    return [t.outcome.reward if t.outcome.status == "ok" else None for t in group.trajectories]


def normalized_rows(rows: Sequence[Row], *, center: bool) -> list[Row]:
    """Return the rows with their trained tokens' advantages at standard deviation 1 (and mean 0) over all rows."""
    per_token = [[a for a, trained in zip(row.advantages, row.loss_mask, strict=True) if trained] for row in rows]
    flat = [advantage for advantages in per_token for advantage in advantages]
    numbers = iter(normalized(flat, center=center))
    return [
        replace(row, advantages=tuple(next(numbers) if trained else 0.0 for trained in row.loss_mask)) for row in rows
    ]
