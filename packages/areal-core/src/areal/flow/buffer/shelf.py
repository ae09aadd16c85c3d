"""Finished groups in the order in which steps take them; nothing here costs more than O(log n) a group."""

from __future__ import annotations

import heapq
from typing import Literal

from areal.contracts.messages import Group, Version

Order = Literal["issued", "finished"]


class Shelf:
    """Invariant: `first` names the groups that come next and removes none; a group leaves by `pop` alone."""

    def __init__(self, order: Order) -> None:
        self._order: Order = order
        self._groups: dict[int, Group] = {}
        self._oldest: dict[int, Version | None] = {}
        self._by_oldest: dict[Version, set[int]] = {}
        self._open: set[int] = set()
        """Groups in the order ``issued`` that were announced and are not finished."""
        self._line: list[int] = []
        """A heap of numbers that may come next; one that is neither open nor finished has left."""
        self._front: dict[int, None] = {}
        """Finished groups before which nothing is open, in order; only in the order ``issued``."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, number: int) -> bool:
        return number in self._groups

    def __getitem__(self, number: int) -> Group:
        return self._groups[number]

    def announce(self, number: int) -> None:
        """A group will be finished some day; in the order ``issued`` none with a higher number comes before it."""
        if self._order == "finished":
            return
        if self._front and number < next(reversed(self._front)):
            for later in self._front:
                heapq.heappush(self._line, later)
            self._front.clear()
        self._open.add(number)
        heapq.heappush(self._line, number)

    def add(self, group: Group, oldest: Version | None) -> None:
        """Take a finished group, announced before or not; `oldest`: the oldest weights among its tokens, if any."""
        number = group.number
        if number not in self._open:
            self.announce(number)
        self._open.discard(number)
        if self._order == "finished":
            heapq.heappush(self._line, number)
        self._groups[number], self._oldest[number] = group, oldest
        if oldest is not None:
            self._by_oldest.setdefault(oldest, set()).add(number)

    def pop(self, number: int) -> Group:
        oldest = self._oldest.pop(number)
        if oldest is not None:
            self._by_oldest[oldest].discard(number)
            if not self._by_oldest[oldest]:
                del self._by_oldest[oldest]
        self._front.pop(number, None)
        return self._groups.pop(number)

    def older_than(self, version: Version) -> list[int]:
        """Return the finished groups with a token of weights before `version`, in order."""
        return sorted(n for oldest, numbers in self._by_oldest.items() if oldest < version for n in numbers)

    def first(self, num_groups: int) -> list[int] | None:
        """Return the numbers of the next groups in order, or None while they are not all finished."""
        if len(self._groups) < num_groups:
            return None
        return self._first_issued(num_groups) if self._order == "issued" else self._first_finished(num_groups)

    def _first_issued(self, num_groups: int) -> list[int] | None:
        while len(self._front) < num_groups and self._line and self._line[0] not in self._open:
            number = heapq.heappop(self._line)
            if number in self._groups:
                self._front[number] = None
        if len(self._front) < num_groups:
            return None
        return [number for number, _ in zip(self._front, range(num_groups), strict=False)]

    def _first_finished(self, num_groups: int) -> list[int]:
        found: dict[int, None] = {}
        while len(found) < num_groups:
            number = heapq.heappop(self._line)  # twice in it is a group that left and came back
            if number in self._groups:
                found[number] = None
        for number in found:
            heapq.heappush(self._line, number)
        return list(found)
