"""The run's own first policy: a copy of this rank's weights that takes the policy's place for a forward pass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class FrozenReference:
    """Invariant: outside `in_place` it holds the weights of ``actor@0``, and the module the policy's."""

    def __init__(self, weights: list[Tensor]) -> None:
        """`weights`: float32, one for each part that the rank holds."""
        self.weights = weights

    @contextmanager
    def in_place(self, views: Sequence[Tensor]) -> Generator[None]:
        """Exchange what is in the module's memory for these; FSDP gathers from that memory and no other."""
        self._exchange(views)
        try:
            yield
        finally:
            self._exchange(views)

    @torch.no_grad()
    def _exchange(self, views: Sequence[Tensor]) -> None:
        for view, weight in zip(views, self.weights, strict=True):
            held = view.clone()
            view.copy_(weight)
            weight.copy_(held)
