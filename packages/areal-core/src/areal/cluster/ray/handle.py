"""A worker that is a Ray actor, as its callers hold it."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from areal.cluster.host import CANCEL, Call, Kind, Result
from areal.cluster.process import Process, end, look, tail
from areal.cluster.ray.nodes import run_there
from areal.cluster.reasons import said_by_ray, with_tail
from areal.errors import WorkerDied, WorkerFailed

CLOSE_DEADLINE_S = 5.0
"""A worker that is busy for longer is ended without being asked."""
PATIENCE_S = 0.5
"""A worker that hears of its end from Ray is gone sooner."""
KILL_DEADLINE_S = 5.0
"""The kernel needs a moment to take down a process that holds much memory."""
STACKS_S = 1.0
"""What is asked of a process by a signal is written at once."""
BESIDE = "beside"
"""Ray's concurrency group with a thread of its own: whoever asks there is answered while the event loop is busy."""


class RayHandle:
    """A worker that is a Ray actor. Invariant: each open call ends when its result, its deadline or the death comes.

    It can be sent to other workers, where it opens a mailbox of its own.
    """

    def __init__(self, name: str, actor: Any, process: Process) -> None:
        self.name = name
        self.pid = process.pid
        self.node = process.node
        self.process = process
        self.explain: Callable[[RayError], Awaitable[str]] = self._explain
        """Says why the worker died; the cluster, which knows most, puts its own in."""
        self._actor = actor
        self._caller = uuid.uuid4().hex  # an id that comes again would be given the earlier handle's results
        self._ids = itertools.count()
        self._open: dict[int, Callable[[Result], None]] = {}
        self._outgoing: list[Call] = []
        self._collector: asyncio.Task[None] | None = None
        self._death: WorkerDied | None = None
        self.was_killed = False
        self.is_gone = False
        """Whether Ray has said that the process is gone for good."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self.name, self._actor, self.process)

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        call_id = self._send(method, args, lambda result: None if answer.done() else answer.set_result(result))
        try:
            async with asyncio.timeout(deadline_s):
                _, kind, value = await answer
        except TimeoutError:
            self._cancel(call_id)
            raise WorkerFailed(f"{self.name} did not answer {method!r} within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self._cancel(call_id)
            raise
        finally:
            self._open.pop(call_id, None)
        return self._opened(method, kind, value)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        results: asyncio.Queue[Result] = asyncio.Queue()
        call_id = self._send(method, args, results.put_nowait)
        ended = False
        try:
            while True:
                _, kind, value = await results.get()
                ended = kind != "item"
                item = self._opened(method, kind, value)
                if ended:
                    return
                yield item
        finally:
            self._open.pop(call_id, None)
            if not ended:
                self._cancel(call_id)

    async def close(self) -> None:
        """Ask the worker to give back what outlives its process, such as shared memory."""
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_DEADLINE_S)

    async def kill(self) -> None:
        if self.is_gone:
            return
        self.was_killed = True
        self.died("was ended by the controller")
        answers = self.process.is_here or await self.ping(STACKS_S)
        ray.kill(self._actor, no_restart=True)
        # A process that is stopped, or stuck in C code, does not hear Ray.
        if self.process.is_here:
            await asyncio.to_thread(end, self.process, PATIENCE_S, KILL_DEADLINE_S)
        elif not answers:
            with suppress(TimeoutError):  # its machine is gone, and it with its machine
                await run_there(self.process.node_id, KILL_DEADLINE_S, end, self.process, PATIENCE_S, KILL_DEADLINE_S)

    async def life(self) -> str:
        """Wait until the worker ends by itself and return why; RayError when its process has ended."""
        return await self._actor.lifeline.remote()

    async def ping(self, deadline_s: float) -> bool:
        with suppress(RayError, TimeoutError):
            return await asyncio.wait_for(self._actor.ping.remote(), deadline_s)
        return False

    async def stacks(self, deadline_s: float) -> str:
        told = self._actor.stacks.options(concurrency_group=BESIDE).remote()
        with suppress(RayError, TimeoutError):
            return await asyncio.wait_for(told, max(deadline_s - STACKS_S, deadline_s / 2))
        left_s = min(STACKS_S, deadline_s / 2)
        if self.process.is_here:
            return await asyncio.to_thread(look, self.process, left_s)
        try:
            return await run_there(self.process.node_id, deadline_s, look, self.process, left_s)
        except TimeoutError:
            return f"neither process {self.pid} nor its machine {self.node} answered within {deadline_s:g} s"

    def died(self, how: str) -> None:
        """Nothing of the worker is accepted any more: its open calls raise WorkerDied, and all later ones."""
        self._death = self._death or WorkerDied(f"{self.name} {how}")
        for call_id, deliver in self._open.items():
            deliver((call_id, "error", pickle.dumps(self._death)))

    async def _explain(self, error: RayError) -> str:
        """Return what a holder of the handle knows who is not the cluster."""
        said = said_by_ray(error, self.node) or "its process ended"
        return with_tail(said, await asyncio.to_thread(tail, self.process))

    def _opened(self, method: str, kind: Kind, pickled: bytes) -> Any:
        try:
            value = pickle.loads(pickled)
        except Exception as error:
            raise WorkerFailed(f"the answer of {self.name} to {method!r} cannot be read here: {error}") from error
        if kind == "error":
            raise value
        return value

    def _send(self, method: str, args: tuple[Any, ...], deliver: Callable[[Result], None]) -> int:
        if self._death is not None:
            raise self._death
        try:
            arguments = pickle.dumps(args)
        except Exception as error:
            raise WorkerFailed(f"{self.name} cannot be sent the arguments of {method!r}: {error}") from error
        call_id = next(self._ids)
        self._open[call_id] = deliver
        self._post((call_id, method, arguments))
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())
        return call_id

    def _post(self, call: Call) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(call)

    def _flush(self) -> None:
        calls, self._outgoing = self._outgoing, []
        # A worker that is gone is noticed by the collector.
        self._actor.submit.remote(self._caller, calls)

    def _cancel(self, call_id: int) -> None:
        self._post((call_id, CANCEL, b""))

    async def _collect(self) -> None:
        try:
            while self._open:
                for result in await self._actor.collect.remote(self._caller):
                    if deliver := self._open.get(result[0]):
                        deliver(result)
                # Let the callers take what came before asking whether anybody still waits.
                await asyncio.sleep(0)
        except RayError as error:
            self.died(f"died: {await self.explain(error)}")
