"""The cluster: where workers run. The controller sees handles, never processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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
    python: str = ""
    """Absolute path of the interpreter the worker runs in, the same on every machine; empty: the controller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """Invariant: reported once per worker that ended, by itself or by `kill`, while the cluster was open."""

    name: str
    reason: str
    """Exit code or signal, or what the worker said of its own end, and the last lines of its log."""


class Calls(Protocol):
    """Whatever answers calls: a worker, or a seat whose worker may change. Invariant: every call ends."""

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method, sync or async; WorkerFailed when the worker dies or the deadline passes."""
        ...


class Handle(Calls, Protocol):  # TEMPORARY
    """A running worker. Invariant: every call ends: with a value, the worker's exception, or WorkerFailed."""

    name: str
    pid: int
    node: str

    async def ping(self, deadline_s: float) -> bool: ...

    async def stacks(self, deadline_s: float) -> str: ...

    def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Call an async generator method and yield its items as they come."""
        ...

    async def kill(self) -> None:
        """End the worker now; its open calls raise WorkerFailed."""
        ...


@runtime_checkable
class Cluster(Protocol):
    """Made as ``factory(options, run_dir)``. Invariant: after `close` no worker of this run is alive."""

    async def start(self) -> None:
        """Connect or start what carries the workers; WorkerFailed in one sentence."""
        ...

    async def spawn(self, spec: WorkerSpec) -> Handle:
        """Start a worker and return once its factory has returned; WorkerFailed in one sentence."""
        ...

    def watch(self) -> AsyncIterator[WorkerDeath]:
        """Yield deaths as they are noticed, for ever."""
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
