"""Metrics to the trackers and steps to the plugins, none of which may stop the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from areal.contracts.tracker import Rewinds, Tracker


class TrackerGroup:
    """Invariant: a tracker that raises is reported once and left out from then on; the run goes on."""

    def __init__(self, trackers: Sequence[tuple[str, Tracker]], on_failure: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._on_failure = on_failure

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in list(self._trackers):
            self._guard(name, lambda tracker: tracker.log(step, metrics))

    def rewind(self, step: int) -> None:
        """Let those that can forget what came after `step`."""
        for name, tracker in list(self._trackers.items()):
            if isinstance(tracker, Rewinds):
                self._guard(name, lambda tracker: cast(Rewinds, tracker).rewind(step))

    def close(self) -> None:
        for name in list(self._trackers):
            self._guard(name, lambda tracker: tracker.close())

    def _guard(self, name: str, action: Callable[[Tracker], None]) -> None:
        try:
            action(self._trackers[name])
        except Exception as error:  # a service that is down, a full disk: the run matters more
            del self._trackers[name]
            self._on_failure(f"tracker {name!r} failed and is left out from now on: {type(error).__name__}: {error}")
