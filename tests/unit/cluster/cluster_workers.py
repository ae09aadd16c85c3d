"""What the clusters' tests run in their workers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from areal.errors import ArealError, ConfigError, WorkerDied


class AwkwardError(ArealError):
    """Pickles, and cannot be unpickled: its constructor wants more than its text."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{what} at {where}")


class Freezes:
    """Stops its own process when it is made, or when it starts. Invariant: does nothing else."""

    def __init__(self, when: str) -> None:
        if when == "made":
            os.kill(os.getpid(), signal.SIGSTOP)

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Worker:
    """Does as it is told. Invariant: `log` is what happened in it, in order."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.log: list[Any] = []

    def echo(self, value: Any) -> Any:
        return value

    async def echo_later(self, value: Any, seconds: float = 0.0) -> Any:
        await asyncio.sleep(seconds)
        return value

    async def count(self, limit: int, fail_at: int = -1) -> AsyncIterator[int]:
        try:
            for number in range(limit):
                if number == fail_at:
                    raise ValueError(f"no {number}")
                yield number
                await asyncio.sleep(0)
        finally:
            self.log.append("counted")

    async def hang(self) -> None:
        self.log.append("hangs")
        try:
            await asyncio.sleep(60)
        finally:
            self.log.append("hangs no more")

    async def hang_after(self, value: int) -> AsyncIterator[int]:
        yield value
        await self.hang()

    def fail(self, kind: str) -> None:
        errors: dict[str, BaseException] = {
            "areal": ConfigError("no such thing; did you mean 'that'?"),
            "died": WorkerDied("somebody else died"),
            "awkward": AwkwardError("the door", "stuck"),
            "value": ValueError("a bad value"),
            "timeout": TimeoutError("my own clock"),
            "exit": SystemExit(3),
        }
        raise errors[kind]

    def append(self, value: Any) -> None:
        self.log.append(value)

    def get_log(self) -> list[Any]:
        return self.log

    def get_args(self) -> tuple[Any, ...]:
        return self.args

    def pid(self) -> int:
        return os.getpid()

    def interpreter(self) -> tuple[str, str]:
        return sys.executable, sys.prefix

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)
        print(text, "as an error", file=sys.stderr)
        os.write(1, f"{text} from C\n".encode())
        sys.stdout.flush()

    def close(self) -> None:
        self.say("closed")

    def lock(self) -> Any:
        return threading.Lock()

    async def ask(self, handle: Any, method: str, *args: Any) -> Any:
        return await handle.call(method, *args)


class Ending(Worker):
    """Ends by itself once it is told to. Invariant: `ended` returns what `break_down` was told, or raises it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._end: asyncio.Future[str] = asyncio.get_event_loop().create_future()

    async def ended(self) -> str:
        return await self._end

    async def break_down(self, reason: str) -> None:
        if reason:
            self._end.set_result(reason)
        else:
            self._end.set_exception(ValueError("a bad watch"))
        await self.hang()


def refuses(*_: Any) -> None:
    raise ConfigError("environment 'x' needs data")


def breaks(*_: Any) -> None:
    raise ValueError("a bad value")


def leaves(*_: Any) -> None:
    os._exit(3)


class Mortal(Worker):
    """Dies and hangs in many ways. Invariant: the way is the one that it was told."""

    async def die(self, way: str) -> None:
        if way == "os._exit":
            os._exit(3)
        if way == "sys.exit":  # in a callback, which is nobody's call: the event loop itself ends
            asyncio.get_running_loop().call_soon(sys.exit, 4)
        elif way == "crash":
            ctypes.string_at(0)
        elif way == "abort":
            os.abort()
        else:
            os.kill(os.getpid(), getattr(signal, way))
        await asyncio.sleep(60)

    async def block_the_loop(self) -> None:
        time.sleep(60)  # noqa: ASYNC251 -- that is the fault

    async def hold_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(60)

    def spin(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    def take_memory(self, num_bytes: int) -> None:
        self.taken: list[bytes] = []
        while sum(map(len, self.taken)) < num_bytes:
            self.taken.append(b"\1" * (64 << 20))
            time.sleep(0.05)  # the monitor looks again
        time.sleep(60)
