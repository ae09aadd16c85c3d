"""The cluster ``sim``: all workers in this process, on a virtual clock, with deaths drawn from a seed."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable
from typing import Any, cast

from pydantic import Field

from areal.builtins.sim.clock import VirtualLoop, collecting
from areal.cluster.host import collect_rarely
from areal.cluster.inline import InlineCluster, InlineHandle
from areal.contracts.cluster import WorkerDeath, WorkerSpec
from areal.contracts.component import Component
from areal.contracts.options import Options
from areal.errors import WorkerFailed

SIMULATED = "simulated"
"""Capability of an engine or backend that computes nothing and only takes time on the event loop's clock."""
MOST_DEATHS_PER_HOUR = 3600.0
COMPUTES = {"engine": "engine", "trainer": "backend"}
"""What the recipe calls the component of a kind of worker."""


class SimClusterOptions(Options):
    """Invariant: with the same seed the same engines die at the same age."""

    start_s: float = Field(default=0.0, ge=0)
    """Seconds until a worker's process is there; an engine's own start comes on top."""
    engine_deaths_per_hour: float = Field(default=0.0, ge=0, le=MOST_DEATHS_PER_HOUR)
    """Deaths of each engine in an hour, at random moments (a Poisson process): 0.1 is one in ten engines an hour."""
    seed: int = 1
    """Decides which engines die when."""


class _InOrder(dict[asyncio.Timeout, None]):
    """A set that keeps the order of `add`. Invariant: what is done to all is done in that order, in each run."""

    def add(self, deadline: asyncio.Timeout) -> None:
        self[deadline] = None

    def discard(self, deadline: asyncio.Timeout) -> None:
        self.pop(deadline, None)


class SimHandle(InlineHandle):
    """A worker whose sync methods take what they charge. Invariant: they run one after the other, others go on."""

    def __init__(self, name: str, worker: Any, on_end: Callable[[WorkerDeath], None]) -> None:
        super().__init__(name, worker, on_end)
        self._open: Any = _InOrder()
        self._turn = asyncio.Lock()

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        async with self._waiting(method, deadline_s):
            function = getattr(self._worker, method)
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            async with self._turn:
                with collecting() as bill:
                    result = function(*args)
                await asyncio.sleep(sum(bill))
                return result

    async def die(self, reason: str) -> None:
        """End as a process that was killed does: the worker is not asked to close."""
        if self._worker is not None:
            self._worker = object()
            await self.end(reason)


class SimCluster(InlineCluster):
    """Cluster ``sim``. Invariant: nothing runs outside this process, and time passes only where somebody waits.

    An engine that dies is not asked to close: its open calls raise WorkerDied, and `watch` tells of it.
    """

    handle_type = SimHandle

    def __init__(self, options: SimClusterOptions, run_dir: str) -> None:
        super().__init__(options, run_dir)
        self._options = options

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop whose clock jumps (`areal.contracts.cluster.MakesLoop`)."""
        return VirtualLoop()

    async def start(self) -> None:
        collect_rarely()

    async def spawn(self, spec: WorkerSpec) -> SimHandle:
        """Start a worker; WorkerFailed for an engine or a trainer that computes."""
        _check_takes_time_only(spec)
        await asyncio.sleep(self._options.start_s)
        handle = cast(SimHandle, await super().spawn(spec))
        if spec.kind == "engine" and self._options.engine_deaths_per_hour:
            self._ending.append(asyncio.create_task(self._die_some_day(handle)))
        return handle

    async def _die_some_day(self, handle: SimHandle) -> None:
        draw = random.Random(f"{self._options.seed}/{handle.name}")
        age_s = draw.expovariate(self._options.engine_deaths_per_hour / 3600.0)
        await asyncio.sleep(age_s)
        await handle.die(f"a simulated death at the age of {age_s:.0f} s")


def _check_takes_time_only(spec: WorkerSpec) -> None:
    """Refuse what computes: the virtual clock would not know how long it takes, and run every deadline out."""
    if (kind := COMPUTES.get(spec.kind)) is None:
        return
    component = next((arg for arg in spec.args if isinstance(arg, Component)), None)
    if component is not None and SIMULATED not in component.capabilities:
        raise WorkerFailed(
            f"{spec.name} did not start: {kind} {component.name!r} computes, and the cluster 'sim' has a clock that "
            f"waits for no computing; use {kind} sim, or another cluster, such as inline"
        )
