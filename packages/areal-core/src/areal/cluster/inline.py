"""Everything in one process: deterministic, and a debugger sees all of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

from areal import env
from areal.contracts.cluster import WorkerDeath, WorkerSpec
from areal.contracts.component import import_object
from areal.contracts.options import Options
from areal.errors import WorkerDied, WorkerFailed


class InlineHandle:
    """A worker that is an object of this process. Invariant: sync methods run at once, in the order of the calls."""

    def __init__(self, name: str, worker: Any) -> None:
        self.name = name
        self._worker = worker

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        if self._worker is None:
            raise WorkerDied(f"{self.name} was asked for {method!r} after it had ended")
        try:
            async with asyncio.timeout(deadline_s):
                result = getattr(self._worker, method)(*args)
                return await result if inspect.isawaitable(result) else result
        except TimeoutError:
            raise WorkerFailed(f"{self.name} did not answer {method!r} within {deadline_s:g} s") from None

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        if self._worker is None:
            raise WorkerDied(f"{self.name} was asked for {method!r} after it had ended")
        async for item in getattr(self._worker, method)(*args):
            yield item

    async def kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and hasattr(worker, "close"):
            result = worker.close()
            if inspect.isawaitable(result):
                await result


class InlineCluster:
    """Cluster ``inline``. Invariant: nothing runs outside this process, and nothing runs in a second thread."""

    def __init__(self, options: Options, run_dir: str) -> None:
        self._handles: list[InlineHandle] = []

    async def start(self) -> None:
        """Nothing to start."""

    async def spawn(self, spec: WorkerSpec) -> InlineHandle:
        env.setdefault(spec.environment)
        handle = InlineHandle(spec.name, import_object(spec.factory)(*spec.args))
        self._handles.append(handle)
        return handle

    async def watch(self) -> AsyncIterator[WorkerDeath]:
        await asyncio.Event().wait()  # objects do not die; the controller cancels this wait when it ends
        yield WorkerDeath(name="", reason="")

    async def close(self) -> None:
        for handle in reversed(self._handles):
            await handle.kill()
