"""The run's own first policy: a copy of the weights that takes the policy's place for a forward pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class FrozenReference:
    """Invariant: outside `in_place` it holds the weights of ``actor@0``, and the module the policy's."""

    def __init__(self, weights: list[Tensor]) -> None:
        """`weights`: float32, in the order of the module's parameters."""
        self.weights = weights

    @contextmanager
    def in_place(self, module: nn.Module) -> Generator[None]:
        """Exchange the module's weights for these; nothing is copied."""
        self._exchange(module)
        try:
            yield
        finally:
            self._exchange(module)

    def move(self, device: torch.device | str) -> None:
        self.weights = [tensor.to(device) for tensor in self.weights]

    def _exchange(self, module: nn.Module) -> None:
        for i, parameter in enumerate(module.parameters()):
            parameter.data, self.weights[i] = self.weights[i], parameter.data
