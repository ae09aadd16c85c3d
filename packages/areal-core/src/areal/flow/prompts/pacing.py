"""When the next prompt may be issued: the staleness law at the entrance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal.contracts.messages import Version


class Pacing:
    """Slots for groups. Invariant: useful groups issued never exceed (served + max_staleness + 1) x batch_size.

    Group i belongs to training step i // batch_size, which consumes it on the weights of that number; with the
    served version at most `max_staleness` behind, a group that is consumed in its turn cannot be too old
    (AReaL, arXiv 2505.24298, section 5.1, counted in groups). Dropped groups give their slot back.
        batch 2, max 0:  0 1 | publish 1 | 2 3 | publish 2 | ...      synchronous
        batch 2, max 1:  0 1 2 3 | publish 1 | 4 5 | ...
    """

    def __init__(
        self, *, batch_size: int, max_staleness: int, max_steps: int, served: Version, num_issued: int, num_dropped: int
    ) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_steps = max_steps
        self._served = served
        self._num_dropped = num_dropped
        self.num_issued = num_issued
        self._changed = asyncio.Event()

    @property
    def served(self) -> Version:
        """The version that the engines serve."""
        return self._served

    @property
    def num_free(self) -> int:
        return self._free(self._max_staleness)

    def _free(self, ahead: int) -> int:
        steps = min(self._served + ahead + 1, self._max_steps)
        return steps * self._batch_size - (self.num_issued - self._num_dropped)

    def publish(self, version: Version) -> None:
        self._served = version
        self._changed.set()

    def rewind(self, version: Version, num_dropped: int) -> None:
        """Go back to an earlier version, with so many groups dropped by its time; what was issued stays issued."""
        self._num_dropped = num_dropped
        self.publish(version)

    def drop(self, num_groups: int) -> None:
        """Give back the slots of groups that left the buffer untrained."""
        self._num_dropped += num_groups
        self._changed.set()

    def is_turn_of(self, number: int) -> bool:
        """Return whether a group that is made now cannot be too old when its turn to be trained comes."""
        return number - self._num_dropped < (self._served + self._max_staleness + 1) * self._batch_size

    async def turn_of(self, number: int) -> None:
        """Wait until group `number` may be made: at once for one that was just issued; freed by `publish` and `drop`.

        After a resume the engines serve older weights than when an unfinished group was issued: made at once, it
        could be too old when its turn comes.
        """
        while not self.is_turn_of(number):
            self._changed.clear()
            await self._changed.wait()

    async def take(self, is_full: Callable[[], bool] = lambda: False) -> int:
        """Wait until there are free slots and take them all; return how many. Freed by `publish` and `drop`.

        While whoever keeps finished samples `is_full`, only the running step's slots are free.
        """
        while (free := self._free(0 if is_full() else self._max_staleness)) <= 0:
            self._changed.clear()
            await self._changed.wait()
        self.num_issued += free
        return free
