"""Advantages: how much better a trajectory was than the others that answered the same prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

EPS = 1e-6
"""Keeps the quotient finite when all rewards but for rounding are equal."""


def group_advantages(
    rewards: Sequence[float | None], *, normalize_std: bool = True, std_floor: float = 0.0
) -> list[float]:
    """Return ``(reward - mean) / (max(std, std_floor) + EPS)`` for each sample of a group (GRPO, arXiv 2402.03300).

    `rewards`: [G], None for a sample without a reward, which gets advantage 0 and counts in neither mean nor std.
    The standard deviation is the unbiased one (divisor n - 1). Without `normalize_std` the result is
    ``reward - mean``. Equal rewards, a single one included, give exactly 0.
    """
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    mean = statistics.fmean(known)
    scale = max(statistics.stdev(known, mean), std_floor) + EPS if normalize_std else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]
