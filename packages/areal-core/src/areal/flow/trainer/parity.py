"""Parity: whether engine and trainer give the same tokens the same probability."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from areal.contracts.messages import Row

LIMIT = 20.0
"""Differences of logprobs beyond this (nats) count as this, so that a probability of 0 stays a number."""
CAUSES = (
    "the usual causes: another dtype on one side, sampling.temperature applied on one side only, a chat template or "
    "special tokens added twice, layers or tensor-parallel slices in another order, another attention kernel"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Invariant: both are above 0."""

    mean: float
    """Largest mean of ``abs(trainer - engine)`` (nats per token)."""
    kl: float
    """Largest estimate of KL(engine || trainer) (nats per token)."""

    def broken_by(self, figures: Mapping[str, float]) -> str:
        """Return one sentence on what is too far apart, or an empty string."""
        mean, kl = figures.get("parity/mean", 0.0), figures.get("parity/kl", 0.0)
        if mean <= self.mean and kl <= self.kl:
            return ""
        return (
            f"engine and trainer disagree about the same weights: over {figures.get('parity/tokens', 0):.0f} tokens "
            f"logprobs differ by {mean:.3g} on average (bound {self.mean:g}) and by "
            f"{figures.get('parity/max', mean):.3g} at most, KL {kl:.3g} (bound {self.kl:g}); {CAUSES}"
        )


def compared(rows: Sequence[Row], trainer: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return mean and largest difference and KL (k3) between the rows' logprobs and the `trainer`'s ([T] each)."""
    gaps = [
        max(-LIMIT, min(LIMIT, mine - theirs)) if mine != theirs else 0.0
        for row, numbers in zip(rows, trainer, strict=True)
        for mine, theirs in zip(compress(numbers, row.loss_mask), compress(row.logprobs, row.loss_mask), strict=True)
    ]
    if not gaps:
        return {"parity/tokens": 0.0}
    return {
        "parity/tokens": float(len(gaps)),
        "parity/mean": sum(abs(gap) for gap in gaps) / len(gaps),
        "parity/max": max(abs(gap) for gap in gaps),
        "parity/kl": sum(math.expm1(gap) - gap for gap in gaps) / len(gaps),
    }
