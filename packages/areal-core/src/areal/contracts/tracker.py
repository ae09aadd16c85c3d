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


@runtime_checkable
class Rewinds(Protocol):
    """Optional: a tracker that can forget. Invariant: each step stands once, however often the run went back."""

    def rewind(self, step: int) -> None:
        """Forget everything of later steps: the run goes on from this one, with another trainer."""
        ...
