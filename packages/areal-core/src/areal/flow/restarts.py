"""How many workers may be lost, and how soon one is replaced."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from areal.errors import WorkerFailed, first_line

CALM_S = 60.0
"""A worker that lived for so long was in order: its successor starts at once."""
LONGEST_PAUSE_S = 60.0
REPORTED = 5
"""Losses that a report names; what broke first says more than what broke after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A place to be filled again. Invariant: `pause_s` doubles with each quick death in a row."""

    quick: int
    """Deaths in a row of workers that had just started."""
    pause_s: float
    """To be waited before the next attempt."""


class Restarts:
    """The run's budget of failures. Invariant: of any `window_s` seconds at most `most` losses are borne.

    Times are those of the event loop's clock.
    """

    def __init__(self, *, most: int, window_s: float, backoff_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._born: dict[str, tuple[float, int]] = {}
        """When each worker started, and how many quick deaths came before it in its place."""
        self._recent: deque[tuple[float, str]] = deque()
        self.num_lost = 0

    def born(self, name: str, quick: int = 0) -> None:
        """A worker has started, after so many quick deaths in its place."""
        self._born[name] = (_now(), quick)

    def lost(self, name: str, reason: str) -> Turn:
        """Count a loss; return when its place is to be filled. WorkerFailed with a report when it is one too many."""
        self._count(name, reason)
        since, quick = self._born.pop(name, (_now(), 0))
        return self._turn(quick + 1 if _now() - since < CALM_S else 0)

    def failed(self, turn: Turn, name: str, reason: str, *, counts: bool) -> Turn:
        """Another attempt at a place has failed; `counts`: whether the run cannot go on without it. WorkerFailed."""
        if counts:
            self._count(name, reason)
        return self._turn(turn.quick + 1)

    def _turn(self, quick: int) -> Turn:
        # The first death may be anybody's; the next ones in the same place are no accident.
        pause_s = self._backoff_s * 2 ** min(quick - 2, 30) if quick > 1 else 0.0
        return Turn(quick=quick, pause_s=min(pause_s, LONGEST_PAUSE_S))

    def _count(self, name: str, reason: str) -> None:
        now = _now()
        self.num_lost += 1
        self._recent.append((now, f"{name}: {first_line(reason)}"))
        while self._recent[0][0] < now - self._window_s:
            self._recent.popleft()
        if len(self._recent) > self._most:
            said = "".join(f"\n  {sentence}" for _, sentence in list(self._recent)[:REPORTED])
            more = f"\n  and {len(self._recent) - REPORTED} more" if len(self._recent) > REPORTED else ""
            raise WorkerFailed(
                f"{len(self._recent)} workers were lost within {self._window_s:g} s, more than the {self._most} that "
                f"failures.max_restarts allows; the first of them:{said}{more}\n{reason}"
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
