"""The algorithm: from rewards to advantages, from logprobs to a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

from pydantic import AfterValidator

from areal.contracts.messages import Group, Row, Version
from areal.contracts.options import Options

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
    version: Version
    """The weights before this step's first update."""
    first_update: bool
    """No update of this step came before: the current policy is the proximal one."""
    reference_logprobs: Tensor | None = None
    """[N] float32, of the reference policy, if the algorithm needs one; no gradient."""
    old_values: Tensor | None = None
    """[N] float32, the critic's values before this step, if there is a critic; no gradient."""
    returns: Tensor | None = None
    """[N] float32, what the critic learns to foretell; no gradient."""
    sequence: Tensor
    """[N] int64, 0..R-1: the row of each token inside this micro-batch, ascending."""
    num_sequences: int
    """R, rows of this micro-batch."""
    group: Tensor
    """[R] int64, 0..G-1: rows with the same number answer the same prompt."""
    entropy: Tensor
    """[N] float32, entropy of the current policy at each token (nats), with gradient."""
    total_tokens: int
    """Trained tokens of the whole batch: divide token sums by it."""
    total_sequences: int
    """Sequences of the whole batch: divide sequence sums by it."""
    computed_tokens: int
    """`total_tokens` without the left-out rows': divide reported sums by it, so that they read as means."""
    computed_groups: int
    """Groups of the whole batch that have computed rows: divide sums over comparisons by it."""


class AlgorithmOptions(Options):
    """Base of an algorithm's options. Invariant: a group of `least_group_size` samples can teach something."""

    @property
    def least_group_size(self) -> int:
        """Samples of a prompt below which every advantage would be 0; the recipe is refused."""
        return 1


ACTOR_0 = "actor@0"
"""The reference policy that is the run's own, before the first training step."""


def _checked_ref(ref: str) -> str:
    if not ref or (ref != ACTOR_0 and ref.startswith("actor@")):
        raise ValueError(f"{ref!r} names no reference policy; write {ACTOR_0}, an HF folder or a hub id")
    return ref


Ref = Annotated[str, AfterValidator(_checked_ref)]
"""An option that names a reference policy: ``actor@0``, an HF folder or a hub id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm's loss reads besides samples and advantages. Invariant: what is not asked for costs nothing."""

    advantage: bool = True
    """Tokens with advantage 0 give no gradient, so that rows without any other token may be left out."""
    proximal: bool = True
    """Logprobs before the step's first update; with several mini-batches they cost a forward pass."""
    reference: str = ""
    """Whose logprobs stand in `reference_logprobs`: ``actor@0``, an HF folder or hub id; empty: nobody's."""
    whole_groups: bool = False
    """The loss compares rows of one group, so they are computed in one micro-batch."""


class Loss(Protocol):
    """What a backend minimises. Invariant: a sum over micro-batches divided by the whole batch's totals."""

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return this micro-batch's share of the loss (scalar) and named sums already divided by the totals.

        The backend adds the named numbers over micro-batches; of a name that ends in ``_max`` it keeps the largest.
        `logprobs`: [N] float32 with gradient, natural log, at the sampling temperature; a critic's values instead.
        """
        ...


@runtime_checkable
class Algorithm(Loss, Protocol):
    """Made as ``factory(options)``; small and picklable, it travels to the trainer.

    Invariant: advantages depend on the group alone, the loss on the whole batch but not on its packing.
    """

    needs: Needs

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """Return for each trajectory one number for all its tokens, or one number per sampled token.

        Trajectories whose outcome is not ok have reward None; the algorithm gives them advantage 0.
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
class RefinesAdvantages(Protocol):
    """Optional: advantages that need the whole step. Invariant: tokens, masks and logprobs stay as they were."""

    def refine(self, rows: Sequence[Row]) -> list[Row]:
        """Return the step's rows with other advantages, and with `returns` if there is a critic.

        Called once a step, before mini-batches are made; values and reference logprobs are there if asked for.
        """
        ...


@runtime_checkable
class UsesCritic(Protocol):
    """Optional: an algorithm with a value model. Invariant: policy and critic learn from the same mini-batches."""

    critic: Loss
    """Reads `old_values` and `returns`; a second instance of the backend, made as a critic, minimises it.

    An attribute `critic_learning_rate` (float or None) beside it is the highest rate of its schedule; without one it
    has the policy's.
    """
