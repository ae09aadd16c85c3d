"""The cluster: where workers run. The controller sees handles, never processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from areal.errors import WorkerDied


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Invariant: `factory` and `args` alone make the worker; it shares no memory with the controller."""

    name: str
    """Unique in the run, for example ``engine-0``; names the log file."""
    kind: str
    """``engine``, ``trainer`` or ``rollout``."""
    factory: str
    """``"package.module:Class"``, called as ``factory(*args)`` inside the worker."""
    args: tuple[Any, ...] = ()
    """Picklable; may hold other workers' handles."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Set before anything heavy is imported."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """For example ``{"CPU": 1, "infer": 1}``."""
    place: int | None = None
    """Which of the places that its kind has reserved is its own, in their order; None: any that is free."""
    python: str = ""
    """Absolute path of the interpreter the worker runs in, the same on every machine; empty: the controller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What workers of one kind need. Invariant: each of them finds all of `resources` on one node."""

    kind: str
    """`WorkerSpec.kind` of those it is for."""
    resources: Mapping[str, float]
    """Of one worker."""
    count: int
    """How many are wanted."""
    least: int
    """Fewer than that are of no use."""
    together: int = 1
    """So many neighbours sit on one node; divides `count` and `least`."""
    apart: bool = False
    """These on a node of their own, instead of over as many nodes as there are."""
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Resources of one worker of each other kind that sits beside each of these, on the same devices."""

    @property
    def whole(self) -> Mapping[str, float]:
        """Resources of those that sit together and of those beside them."""
        everyone = (self.resources, *self.beside.values())
        names = dict.fromkeys(name for resources in everyone for name in resources)
        return {name: self.together * sum(resources.get(name, 0.0) for resources in everyone) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """Invariant: reported once per worker that ended, by itself or by `kill`, while the cluster was open."""

    name: str
    reason: str
    """One sentence: exit code or signal, memory, the node, or what the worker said of its own end. Then the last lines
    of its log; of several that died together, those of the first."""


class Calls(Protocol):
    """Whatever answers calls: a worker, or a seat whose worker may change. Invariant: every call ends."""

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method, sync or async; WorkerFailed when the worker dies or the deadline passes."""
        ...


class Handle(Calls, Protocol):
    """A running worker. Invariant: every call ends: with a value, the worker's exception, or WorkerFailed."""

    name: str
    pid: int
    """Its process, on `node`."""
    node: str
    """Name or address of its machine."""

    def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Call an async generator method and yield its items as they come."""
        ...

    async def kill(self) -> None:
        """End the worker now, also one that is frozen; its open calls raise WorkerFailed."""
        ...

    async def ping(self, deadline_s: float) -> bool:
        """Return whether the worker answers calls within the deadline; never raises."""
        ...

    async def stacks(self, deadline_s: float) -> str:
        """Return what the worker is doing right now: the stacks of its threads and asyncio tasks.

        Of one that does not answer: the state of its process as seen from outside. Never raises.
        """
        ...


NEWCOMER_SILENCE_S = 120.0
"""Without a sign of life a worker that is being started counts as hanging."""


async def start_of(handle: Handle, deadline_s: float) -> Any:
    """Call `start` of a worker that nobody else watches yet and return what it returns.

    WorkerDied also when it gives no sign of life for `NEWCOMER_SILENCE_S`, which is much less than a start may take.
    """
    starting = asyncio.ensure_future(handle.call("start", deadline_s=deadline_s))
    try:
        while not (await asyncio.wait([starting], timeout=NEWCOMER_SILENCE_S / 8))[0]:
            if not await handle.ping(NEWCOMER_SILENCE_S) and not starting.done():
                raise WorkerDied(f"{handle.name} gave no sign of life for {NEWCOMER_SILENCE_S:g} s while it started")
        return await starting
    finally:
        starting.cancel()


@runtime_checkable
class Reserves(Protocol):
    """A cluster that can be full. Invariant: what `reserve` has returned nobody else gets while the cluster is open."""

    async def reserve(self, rooms: Sequence[Room]) -> Mapping[str, int]:
        """Hold room for all of them at once; return for how many workers of each kind.

        WorkerFailed in one sentence when some kind would get fewer than its `least`.
        """
        ...


@runtime_checkable
class Cluster(Protocol):
    """Made as ``factory(options, run_dir)``. Invariant: after `close` no worker of this run is alive."""

    async def start(self) -> None:
        """Connect or start what carries the workers; WorkerFailed in one sentence."""
        ...

    async def spawn(self, spec: WorkerSpec) -> Handle:
        """Start a worker and return once its factory has returned; WorkerFailed in one sentence, of a process that died
        on the way WorkerDied.

        One of a kind that has reserved room takes some of it, that of a dead one included.
        """
        ...

    def watch(self) -> AsyncIterator[WorkerDeath]:
        """Yield deaths as they are noticed, for ever; WorkerFailed when the cluster itself is gone for good."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class MakesLoop(Protocol):
    """Optional: a cluster on which the controller runs in an event loop of its making, such as a virtual clock.

    Invariant: whatever the loop's clock says, work outside of it is waited for.
    """

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a new loop; the whole run, `start` included, happens in it."""
        ...
