"""The fleet of engine replicas as the controller sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from areal.contracts.cluster import Handle, start_of
from areal.contracts.transfer import Layout
from areal.errors import WorkerFailed
from areal.flow.engine.load import LoadMeter

Spawn = Callable[[str], Awaitable[Handle]]
"""Starts an engine worker of this name and returns its handle; the engine has not loaded its model yet."""
OnChange = Callable[[Mapping[str, Handle]], Awaitable[None]]
"""Told the engines that may serve, whenever they change."""

START_DEADLINE_S = 600.0
"""Loading the largest models from a slow disk takes minutes; beyond this the replica is given up."""
LEAVE_DEADLINE_S = 30.0
"""An engine that is to leave interrupts its requests after at most one pass."""
LEAVE_GRACE_S = 0.5
"""For the interrupted requests' way to whoever asked; a request that misses it is made anew elsewhere."""


@dataclass(slots=True)
class Member:
    """One replica. Invariant: `serving` only after it committed the version that the fleet serves."""

    handle: Handle
    layout: Layout
    serving: bool = False


class Fleet:
    """Invariant: rollout workers are only ever told of engines that serve the current version.

    Every replica has a name of its own that no other one ever had.
    """

    def __init__(self, spawn: Spawn, on_change: OnChange) -> None:
        self._spawn = spawn
        self._on_change = on_change
        self._names = itertools.count()
        self._meter = LoadMeter()
        self._num_joining = 0
        self._is_held = False
        self._has_device = asyncio.Event()
        self._has_device.set()
        self._starting: set[asyncio.Task[None]] = set()
        self.coming: dict[str, float] = {}
        """Replicas that are being started, and since when on the event loop's clock."""
        self.members: dict[str, Member] = {}

    async def add(self) -> str:
        """Start one more replica; it serves after its first commit. WorkerFailed in one sentence."""
        name = f"engine-{next(self._names)}"
        self.coming[name] = asyncio.get_running_loop().time()
        try:
            await self._add(name)
        finally:
            del self.coming[name]
        return name

    async def _add(self, name: str) -> None:
        handle = await self._spawn(name)
        try:
            await self._has_device.wait()
            starting = asyncio.create_task(self._start(name, handle))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            await starting
        except BaseException:
            await handle.kill()
            raise

    async def _start(self, name: str, handle: Handle) -> None:
        layout: Layout = await start_of(handle, START_DEADLINE_S)
        self.members[name] = Member(handle=handle, layout=layout)
        self._num_joining += 1

    async def leave_device(self) -> None:
        """Let no replica start, and count none as stuck, before `take_device`; those that are starting are waited for.

        Their own deadlines end them.
        """
        self._has_device.clear()
        if self._starting:
            await asyncio.wait(self._starting)

    def take_device(self) -> None:
        """The device is the replicas' again."""
        self._meter.excuse()
        self._has_device.set()

    async def committed(self, names: list[str]) -> None:
        """These replicas have the current version now: let them serve."""
        newly = [name for name in names if name in self.members and not self.members[name].serving]
        for name in newly:
            self.members[name].serving = True
            self._num_joining -= 1
        if newly:
            await self._tell()

    async def lost(self, name: str) -> bool:
        """Take a broken replica out and end it; return whether it was still in, and so is to be replaced."""
        member = await self._take_out(name)
        if member is not None:
            await member.handle.kill()
        return member is not None

    async def release(self, name: str) -> None:
        """Let a replica go: what it was answering goes on elsewhere from the tokens it had made."""
        member = await self._take_out(name)
        if member is None:
            return
        with suppress(WorkerFailed):  # one that is broken has nothing to hand over
            await member.handle.call("pause", "abort", deadline_s=LEAVE_DEADLINE_S)
            await asyncio.sleep(LEAVE_GRACE_S)
        await member.handle.kill()

    async def _take_out(self, name: str) -> Member | None:
        member = self.members.pop(name, None)
        if member is None:
            return None
        if member.serving:
            await self._tell()
        else:
            self._num_joining -= 1
        return member

    @property
    def num_serving(self) -> int:
        """Replicas that rollout workers know of."""
        return len(self.members) - self._num_joining

    @property
    def joining(self) -> bool:
        """Whether a replica waits for its first weights."""
        return self._num_joining > 0

    async def _tell(self) -> None:
        await self._on_change({name: m.handle for name, m in self.members.items() if m.serving})

    async def measure_load(self) -> None:
        """Ask all replicas how busy they are; `load` is what it was until they have answered."""
        await self._meter.measure({name: member.handle for name, member in self.members.items()})

    @property
    def load(self) -> Mapping[str, float]:
        """How busy the replicas were when they were last asked, as metrics."""
        return self._meter.figures

    def load_of(self, name: str) -> Mapping[str, float]:
        """How busy one replica was when it was last asked; empty when it did not answer."""
        return self._meter.loads.get(name, {})

    def stuck_s(self, name: str) -> float:
        """For how many seconds a replica has had requests and made no token, as far as it tells.

        0 while somebody holds the replicas, or their device.
        """
        return self._meter.stuck_s(name) if self._has_device.is_set() and not self._is_held else 0.0

    @contextmanager
    def held(self) -> Generator[None]:
        """Somebody makes the replicas stop, as a change of weights does: none of them is stuck meanwhile."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._meter.excuse()
