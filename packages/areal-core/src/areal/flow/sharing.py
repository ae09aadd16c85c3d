"""Trainer and engines on one device, in turn: each gives the other its memory.

trainer's turn    engines: pause(keep), offload      trainer: onload ─ train, send, parity
engines' turn     trainer: offload                   engines: onload, resume ─ commit, generate
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from areal.contracts.cluster import Handle
from areal.errors import WorkerFailed
from areal.flow.engine.fleet import Fleet
from areal.flow.trainer.seat import TrainerSeat

DEADLINE_S = 300.0
"""For one of them to move its memory; it is moved at gigabytes a second."""

Lost = Callable[[str, str], Awaitable[None]]
"""Told the name of an engine that cannot take its turn, and why."""


class OwnDevices:
    """Trainer and engines have a device each. Invariant: nobody waits for anybody."""

    is_shared = False

    async def to_trainer(self) -> None:
        """Return once the trainer may use its device."""

    async def to_engines(self) -> None:
        """Return once the engines may use theirs."""

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncGenerator[None]:
        """Inside, the trainer may use its device; afterwards, whatever happened, the engines theirs."""
        await self.to_trainer()
        try:
            yield
        finally:
            await self.to_engines()


class DeviceSharing(OwnDevices):
    """One device for both. Invariant: no engine makes a token between `to_trainer` and `to_engines`, and each goes on.

    An engine that cannot give or take is lost, so that none is left waiting. A trainer that takes another's place has
    the device from its start, so `to_trainer` comes before it. No two calls run at the same time.
    """

    is_shared = True

    def __init__(self, fleet: Fleet, seat: TrainerSeat, deadline_s: float = DEADLINE_S) -> None:
        self._fleet = fleet
        self._seat = seat
        self._deadline_s = deadline_s
        self._away: set[str] = set()
        """Whoever has given its memory away; a name is never used twice."""
        self.lost: Lost = _end_the_run
        """The keeper's, once there is one."""

    async def to_trainer(self) -> None:
        """Pause the engines and give their memory to the trainer; TrainerLost when it cannot take it in time."""
        await self._fleet.leave_device()
        there = self._fleet.members.items()
        await asyncio.gather(*(self._leave(name, m.handle) for name, m in there if name not in self._away))
        if self._seat.ranks and self._seat.name in self._away:
            await self._seat.call("onload", deadline_s=self._deadline_s)
            self._away.discard(self._seat.name)

    async def to_engines(self) -> None:
        """Give the trainer's memory to the engines and let them go on, whatever becomes of the trainer.

        Raises TrainerLost when it is lost in giving.
        """
        try:
            if self._seat.ranks and self._seat.name not in self._away:
                await self._seat.call("offload", deadline_s=self._deadline_s)
                self._away.add(self._seat.name)
        finally:
            there = self._fleet.members.items()
            await asyncio.gather(*(self._go_on(name, m.handle) for name, m in there if name in self._away))
            self._away &= {self._seat.name}
            self._fleet.take_device()

    async def _leave(self, name: str, engine: Handle) -> None:
        self._away.add(name)  # before it has left: whatever happens on the way, it is asked to go on
        await self._ask(name, engine, ("pause", "keep"), ("offload",))

    async def _go_on(self, name: str, engine: Handle) -> None:
        await self._ask(name, engine, ("onload",), ("resume",))

    async def _ask(self, name: str, engine: Handle, *calls: tuple[str, ...]) -> None:
        method = ""
        try:
            for method, *args in calls:
                await engine.call(method, *args, deadline_s=self._deadline_s)
        except Exception as error:  # whatever a library raises that finds no room on its device
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            await self.lost(name, f"{name} could not {method} to share its device with the trainer: {said}")


async def _end_the_run(_: str, reason: str) -> None:
    raise WorkerFailed(reason)
