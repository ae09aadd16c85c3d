"""How many requests vLLM gets at a time: additive increase, multiplicative decrease, as TCP does (Jacobson 1988)."""

from __future__ import annotations

DECREASE = 0.9
INCREASE_STEPS = 16
"""Steps without preemption or queueing, at the limit, before one more request is let in."""
QUEUED_STEPS = 8
"""Steps with requests waiting inside vLLM that count as queueing; prompts that arrive together wait a few."""


class Admission:
    """Invariant: 1 <= `limit` <= `most`."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most = most
        self.limit = most
        self._adaptive = adaptive
        self._queued = 0
        self._calm = 0
        self._settling = False

    def observe(self, running: int, waiting: int, preempted: int) -> None:
        """Learn from one step: requests that ran, that wait inside vLLM, and that it has just preempted."""
        if not self._adaptive:
            return
        inside = running + waiting
        if self._settling and inside > self.limit:
            return  # what was let in before the last decrease has to leave first
        self._settling = False
        self._queued = self._queued + 1 if waiting else 0
        if preempted or self._queued >= QUEUED_STEPS:
            self.limit = max(1, min(self.limit, int(inside * DECREASE)))
            self._queued = self._calm = 0
            self._settling = True
        elif waiting or inside < self.limit:
            self._calm = 0
        else:
            self._calm += 1
            if self._calm >= INCREASE_STEPS:
                self.limit = min(self.most, self.limit + 1)
                self._calm = 0
