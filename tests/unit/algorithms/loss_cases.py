"""Random sequences for the tests of losses, with the loss over any cut into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.contracts.algorithm import TokenBatch

VERSION = 3


class Case:
    """Random sequences. Invariant: one advantage a sequence; rows of `Tensor`s are float64, one entry a token."""

    def __init__(self, seed: int, num_sequences: int = 5, spread: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)

        def uniform(size: int, low: float, high: float) -> Tensor:
            return torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low

        self.lengths = torch.randint(1, 6, (num_sequences,), generator=generator).tolist()
        self.current = [uniform(n, -3, -0.1).requires_grad_() for n in self.lengths]
        self.proximal = [c.detach() + uniform(len(c), -spread, spread) for c in self.current]
        self.behavior = [p + uniform(len(p), -spread, spread) for p in self.proximal]
        self.advantage = uniform(num_sequences, -2, 2).tolist()
        self.first_update = False
        self.fill(spread)

    def fill(self, spread: float = 0.3) -> None:
        """Make all that depends on lengths alone; call it again after changing them."""
        generator = torch.Generator().manual_seed(sum(self.lengths))

        def uniform(size: int, low: float, high: float) -> Tensor:
            return torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low

        self.reference = [c.detach() + uniform(len(c), -spread, spread) for c in self.current]
        self.old_values, self.returns = ([uniform(n, -1, 1) for n in self.lengths] for _ in range(2))
        self.versions = [torch.randint(0, VERSION + 1, (n,), generator=generator).tolist() for n in self.lengths]
        self.groups = [i // 2 for i in range(len(self.lengths))]

    def loss(self, algorithm: Any, *parts: range) -> tuple[float, list[list[float]]]:
        """Return the loss summed over micro-batches of these sequences, and its gradient by token."""
        total = sum(self._share(algorithm, part) for part in parts or [range(len(self.lengths))])
        assert isinstance(total, Tensor)
        return float(total.detach()), self.gradient(total)

    def gradient(self, total: Tensor) -> list[list[float]]:
        slopes = torch.autograd.grad(total, self.current, allow_unused=True)
        return [[0.0] * n if s is None else s.tolist() for s, n in zip(slopes, self.lengths, strict=True)]

    def _share(self, algorithm: Any, part: range) -> Tensor:
        lengths = [self.lengths[i] for i in part]
        size = sum(lengths)
        batch = TokenBatch(
            behavior_logprobs=torch.cat([self.behavior[i] for i in part]),
            proximal_logprobs=torch.cat([self.proximal[i] for i in part]),
            advantages=torch.tensor(
                [self.advantage[i] for i in part for _ in range(self.lengths[i])], dtype=torch.float64
            ),
            versions=torch.tensor([v for i in part for v in self.versions[i]]),
            version=VERSION,
            first_update=self.first_update,
            reference_logprobs=torch.cat([self.reference[i] for i in part]),
            old_values=torch.cat([self.old_values[i] for i in part]),
            returns=torch.cat([self.returns[i] for i in part]),
            sequence=torch.repeat_interleave(torch.arange(len(part)), torch.tensor(lengths)),
            num_sequences=len(part),
            group=torch.tensor([self.groups[i] for i in part]).unique(return_inverse=True)[1],
            entropy=torch.zeros(size, dtype=torch.float64),
            total_tokens=sum(self.lengths),
            total_sequences=len(self.lengths),
            computed_tokens=sum(self.lengths),
            computed_groups=len(set(self.groups)),
        )
        return algorithm.loss(torch.cat([self.current[i] for i in part]), batch)[0]

    def sequences(self) -> list[tuple[Tensor, Tensor, Tensor, float]]:
        return list(zip(self.current, self.proximal, self.behavior, self.advantage, strict=True))


def agree(case: Case, algorithm: Any, literal: Tensor) -> None:
    loss, gradient = case.loss(algorithm)
    assert loss == pytest.approx(float(literal.detach()), abs=1e-9, rel=1e-6)
    for ours, theirs in zip(gradient, case.gradient(literal), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9, rel=1e-6)
