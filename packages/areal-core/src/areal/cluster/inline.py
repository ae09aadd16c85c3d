"""Everything in one process: deterministic, and a debugger sees all of it."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from areal import env
from areal.cluster.host import reason_of_end
from areal.cluster.stacks import stacks_of
from areal.contracts.cluster import WorkerDeath, WorkerSpec
from areal.contracts.component import import_object
from areal.contracts.engine import Ends
from areal.contracts.options import Options
from areal.errors import ArealError, WorkerDied, WorkerFailed


class InlineHandle:
    """A worker that is an object of this process. Invariant: sync methods run at once, in the order of the calls."""

    def __init__(self, name: str, worker: Any, on_end: Callable[[WorkerDeath], None]) -> None:
        self.name = name
        self.pid = os.getpid()
        self.node = platform.node()
        self._worker = worker
        self._on_end = on_end
        self._reason = ""
        self._open: set[asyncio.Timeout] = set()

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        async with self._waiting(method, deadline_s):
            result = getattr(self._worker, method)(*args)
            return await result if inspect.isawaitable(result) else result

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        async with self._waiting(method, None):
            items: AsyncGenerator[Any] = getattr(self._worker, method)(*args)
        async with aclosing(items):
            while True:
                async with self._waiting(method, None):
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item

    @asynccontextmanager
    async def _waiting(self, method: str, deadline_s: float | None) -> AsyncIterator[None]:
        """End what is inside when the deadline passes or the worker is killed, and say which of the two it was."""
        if self._worker is None:
            raise WorkerDied(f"{self.name} was asked for {method!r} after it had ended: {self._reason}")
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                self._open.add(deadline)
                try:
                    yield
                finally:
                    self._open.discard(deadline)
        except ArealError:
            raise
        except Exception as error:
            if not deadline.expired():
                traceback.print_exc()  # the same sentence as from another process, and what a debugger wants to see
                raise WorkerFailed(f"{self.name} failed in {method!r}: {type(error).__name__}: {error}") from error
            if self._worker is None:
                raise WorkerDied(f"{self.name} was ended while it was asked for {method!r}: {self._reason}") from None
            raise WorkerFailed(f"{self.name} did not answer {method!r} within {deadline_s:g} s") from None

    async def kill(self) -> None:
        await self.end("it was ended by the controller")

    async def ping(self, deadline_s: float) -> bool:
        return self._worker is not None

    async def stacks(self, deadline_s: float) -> str:
        if self._worker is None:
            return f"{self.name} has ended: {self._reason}"
        return stacks_of(asyncio.get_running_loop())

    async def end(self, reason: str) -> None:
        """End the worker for this reason, unless it has ended already."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._reason = reason
        for deadline in self._open:
            if not deadline.expired():
                deadline.reschedule(0.0)
        self._on_end(WorkerDeath(name=self.name, reason=reason))
        if hasattr(worker, "close"):
            result = worker.close()
            if inspect.isawaitable(result):
                await result


class InlineCluster:
    """Cluster ``inline``. Invariant: nothing runs outside this process, and nothing runs in a second thread."""

    handle_type = InlineHandle

    def __init__(self, options: Options, run_dir: str) -> None:
        self._handles: list[InlineHandle] = []
        self._ending: list[asyncio.Task[None]] = []
        self._deaths: asyncio.Queue[WorkerDeath] = asyncio.Queue()

    async def start(self) -> None:
        """Nothing to start."""

    async def spawn(self, spec: WorkerSpec) -> InlineHandle:
        if spec.python:
            raise WorkerFailed(
                f"{spec.name} did not start: it is to run in {spec.python}, and the cluster 'inline' is this process; "
                "use cluster ray"
            )
        env.setdefault(spec.environment)
        try:
            worker = import_object(spec.factory)(*spec.args)
        except ArealError as error:
            raise WorkerFailed(f"{spec.name} did not start: {error}") from error
        except Exception as error:
            traceback.print_exc()
            raise WorkerFailed(f"{spec.name} did not start: {type(error).__name__}: {error}") from error
        handle = self.handle_type(spec.name, worker, self._deaths.put_nowait)
        self._handles.append(handle)
        if isinstance(worker, Ends):
            self._ending.append(asyncio.create_task(self._end_with(worker, handle)))
        return handle

    async def _end_with(self, worker: Ends, handle: InlineHandle) -> None:
        """End the handle of a worker that has ended by itself."""
        reason = await reason_of_end(worker)
        try:
            await handle.end(reason)
        except Exception:  # what is broken may fail to close, too
            traceback.print_exc()

    async def watch(self) -> AsyncIterator[WorkerDeath]:
        while True:
            yield await self._deaths.get()  # objects end by `kill`, or say so themselves

    async def close(self) -> None:
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        for handle in reversed(self._handles):
            await handle.kill()
