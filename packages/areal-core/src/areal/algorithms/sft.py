"""SFT: learn reference answers by maximum likelihood; the supervised warm-up uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from areal.contracts.algorithm import AlgorithmOptions, Needs, TokenBatch
from areal.contracts.messages import Group

if TYPE_CHECKING:
    from torch import Tensor


class SftOptions(AlgorithmOptions):
    """There is nothing to choose. Invariant: none beyond `Options`'."""


class Sft:
    """Mean negative log-likelihood of the trained tokens. Invariant: rewards and behaviour logprobs are not read."""

    needs = Needs(advantage=False, proximal=False)

    def __init__(self, options: SftOptions | None = None) -> None:
        self.options = options or SftOptions()

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        """Return 1 for every trajectory."""
        return [1.0] * len(group.trajectories)

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        entropy = batch.entropy.detach().sum() / batch.computed_tokens
        return -logprobs.sum() / batch.total_tokens, {"entropy": entropy}
