"""Virtual time: an event loop that jumps to its next timer instead of waiting for it.

What happens outside the loop is really waited for, and takes no virtual time: jobs of `run_in_executor` (and so of
`asyncio.to_thread`), pipes and connections. So a run takes as long as its computing, and with the same input it is the
same run.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import stat
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from areal.errors import WorkerFailed

_bill: ContextVar[list[float] | None] = ContextVar("simulated seconds of the call that runs", default=None)


def charge(seconds: float) -> None:
    """Let the sync method of a worker that calls this take `seconds`, 0 or more.

    On the cluster ``sim`` the call's answer comes so much later on the virtual clock while all others go on; on any
    other cluster the seconds are slept.
    """
    if seconds < 0:
        raise ValueError(f"a call cannot take {seconds} s")
    bill = _bill.get()
    if bill is None:
        time.sleep(seconds)
    else:
        bill.append(seconds)


@contextmanager
def collecting() -> Generator[list[float]]:
    """Collect what is charged inside this block, in place of sleeping."""
    bill: list[float] = []
    token = _bill.set(bill)
    try:
        yield bill
    finally:
        _bill.reset(token)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Invariant: `time` moves only while nothing is ready and nothing outside is awaited, and never backwards."""

    def __init__(self) -> None:
        self._now = 0.0
        self._num_outside = 0
        self._files = _JumpingSelector(self)
        super().__init__(self._files)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    @property
    def waits_outside(self) -> bool:
        """Whether something outside the loop will wake it: a job in a thread, a pipe, a connection."""
        if self._num_outside:
            return True
        files = self._files.get_map()
        own = cast(Any, self)._ssock.fileno()  # the loop's own socket pair is always there
        return len(files) > 1 and any(_will_speak(fd) for fd in files if fd != own)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        self._num_outside += 1
        try:
            future = asyncio.ensure_future(super().run_in_executor(executor, func, *args), loop=self)
        except BaseException:
            self._num_outside -= 1
            raise
        future.add_done_callback(self._came_back)
        return future

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        return self._until_it_ends(await super().subprocess_exec(*args, **options))

    async def subprocess_shell(self, *args: Any, **options: Any) -> Any:
        return self._until_it_ends(await super().subprocess_shell(*args, **options))

    def _until_it_ends(self, made: tuple[Any, Any]) -> tuple[Any, Any]:
        """Wait outside for a process, whose end Python notices in a thread of its own; `made`: transport, protocol."""
        self._num_outside += 1
        self.create_task(made[0]._wait()).add_done_callback(self._came_back)
        return made

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._num_outside += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._num_outside -= 1

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._num_outside -= 1


class _JumpingSelector(selectors.BaseSelector):
    """Invariant: it waits only for what is outside; a wait for a timer moves the clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready. WorkerFailed when nothing is, nothing is awaited, and there is no timer."""
        if found := self._real.select(0):
            return found
        if timeout is not None and timeout <= 0:
            return []
        if self._loop.waits_outside:
            return self._real.select(None)
        if timeout is None:
            raise WorkerFailed(
                f"the simulation stands still at {self._loop.time():.0f} s: everything waits and no timer is set; "
                "set AREAL_DEBUG_MODE=1 and interrupt the run to see where"
            )
        self._loop.advance(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def _will_speak(fd: int) -> bool:
    """Return whether somebody is at the other end; a socket that listens may stay silent for ever."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return True
    with socket.socket(fileno=os.dup(fd)) as copy:
        return not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
