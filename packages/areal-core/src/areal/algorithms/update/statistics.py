"""From the micro-batches' named numbers to those of the whole update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor


def combined(shares: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add the micro-batches' shares of each statistic, or keep the largest where the name ends in ``_max``."""
    values: dict[str, list[float]] = defaultdict(list)
    for share in shares:
        for name, value in share.items():
            values[name].append(float(value.detach()))
    return {name: max(numbers) if name.endswith("_max") else sum(numbers) for name, numbers in values.items()}
