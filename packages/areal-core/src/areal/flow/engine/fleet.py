"""The fleet of engine replicas as the controller sees it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from areal.contracts.cluster import Handle
from areal.contracts.transfer import Layout
from areal.errors import WorkerFailed
from areal.flow.engine.load import LoadMeter

Spawn = Callable[[str], Awaitable[Handle]]
"""Starts an engine worker of this name and returns its handle; the engine has not loaded its model yet."""
OnChange = Callable[[Mapping[str, Handle]], Awaitable[None]]
"""Told the engines that may serve, whenever they change."""

START_DEADLINE_S = 600.0
"""Loading the largest models from a slow disk takes minutes; beyond this the replica is given up."""


@dataclass(slots=True)
class Member:
    """One replica. Invariant: `serving` only after it committed the version that the fleet serves."""

    handle: Handle
    layout: Layout
    serving: bool = False


class Fleet:
    """Invariant: rollout workers are only ever told of engines that serve the current version.

    A replica that dies is replaced under a new name until `max_restarts` are used up.
    """

    def __init__(self, spawn: Spawn, on_change: OnChange, max_restarts: int) -> None:
        self._spawn = spawn
        self._on_change = on_change
        self._restarts_left = max_restarts
        self._names = itertools.count()
        self._meter = LoadMeter()
        self.members: dict[str, Member] = {}

    async def add(self) -> str:
        """Start one more replica; it serves after its first commit. WorkerFailed in one sentence."""
        name = f"engine-{next(self._names)}"
        handle = await self._spawn(name)
        layout: Layout = await handle.call("start", deadline_s=START_DEADLINE_S)
        self.members[name] = Member(handle=handle, layout=layout)
        return name

    async def committed(self, names: list[str]) -> None:
        """These replicas have the current version now: let them serve."""
        newly = [name for name in names if name in self.members and not self.members[name].serving]
        for name in newly:
            self.members[name].serving = True
        if newly:
            await self._tell()

    async def lost(self, name: str, reason: str) -> bool:
        """Take a replica out; return whether it was still in, and so is to be replaced.

        WorkerFailed when it may not be replaced any more.
        """
        member = self.members.pop(name, None)
        if member is None:
            return False
        if member.serving:
            await self._tell()
        await member.handle.kill()
        if self._restarts_left == 0:
            raise WorkerFailed(f"{name} was lost and the run's budget of engine restarts is used up: {reason}")
        self._restarts_left -= 1
        return True

    @property
    def joining(self) -> bool:
        """Whether a replica waits for its first weights."""
        return any(not member.serving for member in self.members.values())

    async def _tell(self) -> None:
        await self._on_change({name: m.handle for name, m in self.members.items() if m.serving})

    async def measure_load(self) -> None:
        """Ask all replicas how busy they are; `load` is what it was until they have answered."""
        await self._meter.measure({name: member.handle for name, member in self.members.items()})

    @property
    def load(self) -> Mapping[str, float]:
        """How busy the replicas were when they were last asked, as metrics."""
        return self._meter.figures
