"""Commands for a thread that does something else in between."""

from __future__ import annotations

import asyncio
import queue
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from areal_vllm.running import answer

T = TypeVar("T")
_Command = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any] | None"]


class Commands:
    """Invariant: commands run one after the other, in their order, in the thread that calls `obey`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()

    async def call(self, command: Callable[[], T]) -> T:
        """Have a command run and return its result, or raise what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put((command, loop, future))
        return await future

    def post(self, command: Callable[[], Any]) -> None:
        """Have a command run; nobody waits for it."""
        self._queue.put((command, self._loop, None))

    def end(self) -> None:
        """Let `obey` return False once it has run everything before this."""
        self._queue.put(None)

    def obey(self, *, wait: bool) -> bool:
        """Run all commands that are there, and wait for one if `wait`; return False after `end`."""
        while True:
            try:
                found = self._queue.get(block=wait)
            except queue.Empty:
                return True
            if found is None:
                return False
            wait = False
            command, loop, future = found
            try:
                result, error = command(), None
            except Exception as raised:
                result, error = None, raised
                if future is None:
                    traceback.print_exc()
            if future is not None:
                answer(loop, future, result, error)
