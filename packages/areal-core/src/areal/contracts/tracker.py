"""The tracker: where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Made as ``factory(options, TrackerContext)``. Invariant: a tracker's failure never stops a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step; must return at once."""
        ...

    def close(self) -> None: ...
