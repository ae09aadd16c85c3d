"""Continuous batching as arithmetic: which request is done when, without an event for each token.

    pass      a prefill of all that were admitted together, or one decode step of everything that runs
    boundary  the moment between two passes: finished requests leave, waiting ones are admitted, a pause begins
    stretch   decode steps in a row with the same requests: only its end is computed

A boundary is looked at only where something changes there, so a request costs O(log n) however long its answer is.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Literal

Phase = Literal["idle", "prefill", "decode", "stopped"]
INSTANT_S = 1e-9
"""Moments so near to each other are one: sums of floats differ in their last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a pass. Invariant: a decode step takes some time."""

    step_s: float
    """Of a decode step, whatever runs."""
    step_s_per_request: float
    """On top for each running request."""
    prefill_s_per_token: float
    """Of a prompt token; decoding stands still meanwhile."""
    max_running: int

    def step(self, num_running: int) -> float:
        return self.step_s + self.step_s_per_request * num_running


@dataclass(slots=True, eq=False)
class Slot:
    """One request. Invariant: `num_tokens` is final once the slot was returned by `Batching`."""

    num_prompt: int
    limit: int
    """Tokens after which it is done, at least 1."""
    owner: Any = None
    first: int = -1
    """Decode steps of the engine before its first one; -1: not admitted yet."""
    num_tokens: int = 0
    gone: bool = False


class Batching:
    """One replica's time table. Invariant: every admitted request gets one token in each decode step until its limit.

    Methods take `now` in seconds, which never goes back. Whoever owns it calls `advance` at `due`, and no sooner.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._waiting: deque[Slot] = deque()
        self._running: list[tuple[int, int, Slot]] = []
        """(step after which it is done, order of admission, slot)"""
        self._num_admitted = 0
        self._num_gone = 0
        self._phase: Phase = "idle"
        self._began = 0.0
        self._prefilled = 0
        """Prompt tokens of the prefill that runs."""
        self._steps = 0
        self.pausing = False
        """Whether a pause was asked for and not ended; it has begun once `stopped`."""
        self._tokens = 0
        self._worked_s = self._stood_s = 0.0
        self.due: float | None = None
        """When `advance` has something to do; None: not before something is added."""

    @property
    def stopped(self) -> bool:
        """Whether a pause has begun: no pass runs."""
        return self._phase == "stopped"

    @property
    def sizes(self) -> tuple[int, int]:
        """Requests that run, and requests that wait."""
        return len(self._running), len(self._waiting)

    @property
    def first_needed(self) -> int:
        """The fewest decode steps that lie before any running request's first."""
        return min((slot.first for _, _, slot in self._running), default=self._steps)

    def steps(self, now: float) -> int:
        """Return the decode steps that are over."""
        return self._steps + self._steps_since(now)

    def tokens(self, now: float) -> int:
        """Return the tokens made so far."""
        return self._tokens + self._steps_since(now) * len(self._running)

    def busy_s(self, now: float) -> tuple[float, float]:
        """Return the seconds in which a pass ran, and those in which requests stood still in a pause."""
        since = now - self._began
        works, stands = self._phase in ("prefill", "decode"), self.stopped and bool(self._running)
        return self._worked_s + since * works, self._stood_s + since * stands

    def add(self, slot: Slot, now: float, *, first: bool = False) -> None:
        """Let a request wait for its admission; `first`: before all others that wait."""
        (self._waiting.appendleft if first else self._waiting.append)(slot)
        if len(self._running) < self._cost.max_running:
            self._need_boundary(now)

    def leave(self, slot: Slot, now: float) -> None:
        """Take a request back; one that runs leaves at the next boundary."""
        if slot.gone:
            return
        slot.gone = True
        if slot.first < 0:
            self._waiting.remove(slot)
        else:
            self._num_gone += 1
            self._need_boundary(now)

    def pause(self, now: float) -> None:
        """Stop at the next boundary; with nothing running that is now."""
        self.pausing = True
        if self._phase == "idle":
            self._close_stretch(now)
            self._phase, self.due = "stopped", None
        self._need_boundary(now)

    def resume(self, now: float) -> None:
        self.pausing = False
        if self.stopped:
            self._close_stretch(now)
            self._phase = "idle"
            self._need_boundary(now)

    def interrupt(self, now: float) -> list[Slot]:
        """Take out everything that runs, with the tokens it has, and return it in the order of admission."""
        self._close_stretch(now)
        cut = [slot for _, _, slot in sorted(self._running, key=lambda entry: entry[1]) if not slot.gone]
        for slot in cut:
            slot.num_tokens, slot.gone = self._steps - slot.first, True
        self._running, self._num_gone, self._prefilled = [], 0, 0
        if not self.stopped:
            self._phase, self.due = "idle", now
        return cut

    def take_waiting(self) -> list[Slot]:
        """Take out everything that was not admitted yet."""
        taken, self._waiting = list(self._waiting), deque()
        for slot in taken:
            slot.gone = True
        return taken

    def advance(self) -> list[Slot]:
        """Pass the boundary that is due; return what is done there, in the order of admission."""
        if self.due is None:
            return []
        at = self.due
        self._close_stretch(at)
        done = self._leaving()
        if self.pausing:
            self._phase, self.due = "stopped", None
        else:
            self._admit()
            self._begin(at)
        return done

    def _leaving(self) -> list[Slot]:
        done: list[tuple[int, Slot]] = []
        if self._num_gone:
            self._running = [entry for entry in self._running if not entry[2].gone]
            heapify(self._running)
            self._num_gone = 0
        while self._running and self._running[0][0] <= self._steps:
            _, order, slot = heappop(self._running)
            slot.num_tokens, slot.gone = slot.limit, True
            done.append((order, slot))
        return [slot for _, slot in sorted(done, key=lambda entry: entry[0])]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._cost.max_running:
            slot = self._waiting.popleft()
            slot.first = self._steps
            heappush(self._running, (self._steps + slot.limit, self._num_admitted, slot))
            self._num_admitted += 1
            self._prefilled += slot.num_prompt

    def _begin(self, now: float) -> None:
        """Begin the next pass."""
        self._began = now
        if not self._running:
            self._phase, self.due = "idle", None
        elif self._prefilled and self._cost.prefill_s_per_token:
            self._phase, self.due = "prefill", now + self._prefilled * self._cost.prefill_s_per_token
        else:
            self._phase, self._prefilled = "decode", 0
            self.due = now + (self._running[0][0] - self._steps) * self._cost.step(len(self._running))

    def _need_boundary(self, now: float) -> None:
        """Look at the first boundary from `now` on; a pass that began at this very instant has not begun yet."""
        if self._phase == "idle":
            self.due = now
        elif self._phase != "stopped" and now - self._began <= INSTANT_S:
            self.due = self._began
        elif self._phase == "decode" and self.due is not None:
            step_s = self._cost.step(len(self._running))
            steps = math.ceil((now - self._began - INSTANT_S) / step_s)
            self.due = min(self.due, self._began + steps * step_s)

    def _close_stretch(self, now: float) -> None:
        """Count what was done since the phase began."""
        steps = self._steps_since(now)
        self._tokens += steps * len(self._running)
        self._steps += steps
        self._worked_s, self._stood_s = self.busy_s(now)
        if self._phase == "prefill" and now > self._began:
            self._prefilled = 0
        self._began = now

    def _steps_since(self, now: float) -> int:
        if self._phase != "decode":
            return 0
        return math.floor((now - self._began + INSTANT_S) / self._cost.step(len(self._running)))
