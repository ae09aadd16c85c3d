"""Coroutines that live and fail together, where new ones join while the others run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Invariant: once `run` has ended, none of the coroutines started here runs any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine beside the others; its first error ends `run`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, then cancel all others. Raises the first error of any of them."""
        try:
            main = self.start(work)
            await asyncio.wait({main, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                await self._failure
            await main
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failure.done():
            self._failure.set_exception(error)
