"""How many episodes may fail before the run says so and ends."""

from __future__ import annotations

from collections import deque

from areal.contracts.messages import Outcome
from areal.errors import RewardBudgetExceeded


class FailureBudget:
    """Invariant: once a full window holds more failures than allowed, `count` raises with the first failure's text."""

    def __init__(self, *, max_share: float, window: int) -> None:
        self._max_share = max_share
        self._recent: deque[bool] = deque(maxlen=window)
        self._first = ""

    def count(self, outcome: Outcome) -> None:
        """Count one episode; RewardBudgetExceeded when errors and time-outs exceed the share of the last window."""
        failed = outcome.status != "ok"
        if failed and not self._first:
            self._first = f"{outcome.status}: {outcome.detail}"
        self._recent.append(failed)
        if len(self._recent) == self._recent.maxlen and sum(self._recent) > self._max_share * len(self._recent):
            raise RewardBudgetExceeded(
                f"{sum(self._recent)} of the last {len(self._recent)} episodes gave no reward, more than the "
                f"{self._max_share:.0%} that rollout.max_failed_share allows; the first was {self._first}"
            )

    @property
    def said(self) -> str:
        """What failed lately, in a few words; empty when nothing did."""
        if not sum(self._recent):
            return ""
        failed, seen = sum(self._recent), len(self._recent)
        return f"{failed} of the last {seen} episodes gave no reward, the first of all: {self._first}"
