"""The rollout workers as the controller sees them: groups are handed out, and handed out again when a worker dies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from areal.contracts.cluster import Handle
from areal.contracts.messages import Completion
from areal.errors import WorkerDied, WorkerFailed
from areal.flow.rollout.worker import GroupRequest, Part

Spawn = Callable[[str], Awaitable[Handle]]

SILENCE_GRACE_S = 30.0
"""Episodes end by their own deadline; a worker that is silent for so much longer hangs."""
RETRY_PAUSE_S = 0.2
"""Between two attempts at a group, so that a broken worker cannot spin."""
PROBE_ATTEMPTS = 5


class Crew:
    """Invariant: a handed-out group is worked on until all its samples arrived, whatever happens to workers."""

    def __init__(self, spawn: Spawn, episode_timeout_s: float, max_restarts: int) -> None:
        self._spawn = spawn
        self._silence_s = episode_timeout_s + SILENCE_GRACE_S
        self._restarts_left = max_restarts
        self._names = itertools.count()
        self._engines: Mapping[str, Handle] = {}
        self._handles: dict[str, Handle] = {}
        self._busy: dict[str, int] = {}
        self._arrived = asyncio.Event()
        self.num_prompts: dict[str, dict[str, int]] = {}
        """Prompts by environment and split, as the workers found them."""
        self.num_reissued = 0

    async def add(self) -> None:
        """Start one more worker. WorkerFailed or ConfigError in one sentence."""
        name = f"rollout-{next(self._names)}"
        handle = await self._spawn(name)
        self.num_prompts = await handle.call("start", deadline_s=600.0)
        # Known first and told second: engines may change while it is being told.
        self._handles[name] = handle
        self._busy[name] = 0
        await self.use_engines(self._engines)
        self._arrived.set()

    async def use_engines(self, handles: Mapping[str, Handle]) -> None:
        self._engines = handles
        told = (handle.call("use_engines", handles, deadline_s=60.0) for handle in self._handles.values())
        await asyncio.gather(*told, return_exceptions=True)

    async def lost(self, name: str, reason: str) -> None:
        """Take a worker out; WorkerFailed when it may not be replaced any more."""
        handle = self._handles.pop(name, None)
        if handle is None:
            return
        await handle.kill()
        if self._restarts_left == 0:
            raise WorkerFailed(f"{name} was lost and the run's budget of rollout restarts is used up: {reason}")
        self._restarts_left -= 1

    def any(self) -> Handle:
        return next(iter(self._handles.values()))

    async def run(self, request: GroupRequest, missing: Callable[[], tuple[int, ...]]) -> AsyncIterator[Part]:
        """Yield the group's prompt and trajectories; after a failure only what `missing` still names is made again.

        Raises WorkerFailed when attempts keep failing without anything new arriving.
        """
        fruitless = 0
        while samples := missing():
            handle = await self._pick()
            self._busy[handle.name] += 1
            before = len(samples)
            try:
                async for part in self._parts(handle, replace(request, samples=samples)):
                    yield part
            except WorkerFailed as error:
                self.num_reissued += 1
                fruitless = fruitless + 1 if len(missing()) == before else 0
                if fruitless > 5:
                    raise WorkerFailed(f"group {request.number} failed {fruitless} times in a row: {error}") from error
                await asyncio.sleep(RETRY_PAUSE_S * 2**fruitless)
            finally:
                self._busy[handle.name] -= 1

    async def probe(self, draws: Sequence[tuple[str, int]], max_new_tokens: int, deadline_s: float) -> list[Completion]:
        """Return a short completion of each (environment, index) of the training split; WorkerFailed."""
        attempts = 0
        while True:
            handle = await self._pick()
            self._busy[handle.name] += 1
            try:
                return await handle.call("probe", draws, max_new_tokens, deadline_s=deadline_s)
            except WorkerDied:
                attempts += 1
                if attempts == PROBE_ATTEMPTS:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S * 2**attempts)  # until whoever watches has taken it out
            finally:
                self._busy[handle.name] -= 1

    async def _pick(self) -> Handle:
        while not self._handles:
            self._arrived.clear()
            await self._arrived.wait()  # freed by `add`, which the watcher calls for every lost worker
        return self._handles[min(self._handles, key=lambda name: self._busy[name])]

    async def _parts(self, handle: Handle, request: GroupRequest) -> AsyncIterator[Part]:
        parts = handle.stream("run_group", request)
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    part: Part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                await handle.kill()
                raise WorkerFailed(f"{handle.name} was silent for {self._silence_s:g} s and was ended") from None
            yield part
