"""The virtual clock: timers cost no time, what is outside is waited for, and nothing hangs."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from areal.builtins.sim.clock import VirtualLoop, charge, collecting
from areal.errors import WorkerFailed

T = TypeVar("T")
LIMIT_S = 20.0


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_takes_no_time_and_timers_ring_in_order() -> None:
    rung: list[tuple[float, str]] = []

    async def ring(name: str, *waits: float) -> None:
        for wait in waits:
            await asyncio.sleep(wait)
            rung.append((now(), name))

    async def day() -> float:
        await asyncio.gather(ring("a", 10.0, 86_400.0), ring("b", 5.0, 10.0))
        return now()

    began = time.monotonic()
    assert run(day()) == 86_410.0
    assert time.monotonic() - began < LIMIT_S
    assert rung == [(5.0, "b"), (10.0, "a"), (15.0, "b"), (86_410.0, "a")]


def test_deadlines_are_virtual() -> None:
    async def late() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600.0):
                await asyncio.Event().wait()
        return now()

    assert run(late()) == 3600.0


def test_jobs_in_threads_are_waited_for_and_take_no_virtual_time() -> None:
    async def work() -> tuple[float, str]:
        job = asyncio.create_task(asyncio.to_thread(lambda: time.sleep(0.2) or "done"))
        async with asyncio.timeout(0.01):
            return now(), await job

    assert run(work()) == (0.0, "done")


def test_pipes_and_connections_are_waited_for() -> None:
    async def program() -> tuple[float, bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; time.sleep(0.2); print('hello')", stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(0.01):
            said, _ = await process.communicate()
        return now(), said.strip()

    async def connection() -> bytes:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        speaker = threading.Timer(0.2, lambda: theirs.sendall(b"hello\n"))
        speaker.start()
        async with asyncio.timeout(0.01):
            line = await reader.readline()
        writer.close()
        await writer.wait_closed()
        theirs.close()
        speaker.join()
        return line.strip()

    assert run(program()) == (0.0, b"hello")
    assert run(connection()) == b"hello"


def test_a_server_that_nobody_calls_holds_nothing_up() -> None:
    async def serve() -> float:
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0):
            await asyncio.sleep(60.0)
        return now()

    assert run(serve()) == 60.0


def test_a_simulation_that_can_never_go_on_says_so() -> None:
    async def stuck() -> None:
        await asyncio.sleep(7.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(WorkerFailed, match="stands still at 7 s"):
        run(stuck())


def test_the_default_executor_is_shut_down_in_no_virtual_time() -> None:
    async def work() -> None:
        await asyncio.to_thread(lambda: None)

    before = threading.active_count()
    run(work())
    assert threading.active_count() <= before


def test_charges_are_collected_and_slept_elsewhere() -> None:
    with collecting() as bill:
        charge(2.5)
        charge(0.5)
    assert bill == [2.5, 0.5]
    began = time.monotonic()
    charge(0.05)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(ValueError, match="-1"):
        charge(-1)
