"""From the micro-batches' named numbers to those of the whole update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor


def combined(shares: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Add the micro-batches' shares of each statistic, or keep the largest where the name ends in ``_max``.

    What it returns for several ranks is combined in the same way.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for share in shares:
        for name, value in share.items():
            values[name].append(float(value.detach() if isinstance(value, Tensor) else value))
    return {name: max(numbers) if name.endswith("_max") else sum(numbers) for name, numbers in values.items()}
