"""The algorithm: from rewards to advantages, from logprobs to a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from areal.contracts.messages import Group, Row

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trained tokens of one micro-batch, flat. Invariant: whole rows only; all tensors are on one device."""

    behavior_logprobs: Tensor
    """[N] float32, from the engine."""
    proximal_logprobs: Tensor
    """[N] float32, the policy before this step's first update; no gradient."""
    advantages: Tensor
    """[N] float32."""
    versions: Tensor
    """[N] int64, the weights that sampled each token."""
    sequence: Tensor
    """[N] int64, 0..R-1: the row of each token inside this micro-batch, ascending."""
    num_sequences: int
    """R, rows of this micro-batch."""
    entropy: Tensor
    """[N] float32, entropy of the current policy at each token (nats), with gradient."""
    total_tokens: int
    """Trained tokens of the whole batch: divide token sums by it."""
    total_sequences: int
    """Sequences of the whole batch: divide sequence sums by it."""
    computed_tokens: int
    """`total_tokens` without the left-out rows': divide reported sums by it, so that they read as means."""


@runtime_checkable
class Algorithm(Protocol):
    """Made as ``factory(options)``; small and picklable, it travels to the trainer.

    Invariant: the loss is a sum over micro-batches divided by the whole batch's totals.
    """

    needs_advantage: bool
    """Whether tokens with advantage 0 give no gradient, so that rows without any other token may be left out."""

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """Return for each trajectory one number for all its tokens, or one number per sampled token.

        Trajectories whose outcome is not ok have reward None; the algorithm gives them advantage 0.
        """
        ...

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return this micro-batch's share of the loss (scalar) and named sums already divided by the totals.

        The backend adds the named numbers over micro-batches; of a name that ends in ``_max`` it keeps the largest.
        `logprobs`: [N] float32 with gradient, natural log, at the sampling temperature.
        """
        ...


SELECTS_GROUPS = "selects_groups"
"""Capability of an algorithm that implements `SelectsGroups`; such a class is also loaded by the controller."""


@runtime_checkable
class SelectsGroups(Protocol):
    """Optional: an algorithm that passes over finished groups. Invariant: the answer depends on the group alone."""

    def keep(self, group: Group) -> bool:
        """Whether the group is to be trained on; in the place of others new prompts are issued."""
        ...


@runtime_checkable
class NormalizesBatch(Protocol):
    """Optional: an algorithm that compares a whole step. Invariant: tokens, masks and logprobs stay as they were."""

    def normalize(self, rows: Sequence[Row]) -> list[Row]:
        """Return the step's rows with other advantages; called once a step, before mini-batches are made."""
        ...
