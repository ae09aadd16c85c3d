"""The rollout workers as the controller sees them: groups are leased out, and leased out again when a worker fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from areal.contracts.cluster import Handle, start_of
from areal.contracts.messages import Completion, Trajectory
from areal.errors import WorkerDied, WorkerFailed
from areal.flow.rollout.worker import GroupRequest, Part

Spawn = Callable[[str], Awaitable[Handle]]

START_DEADLINE_S = 600.0
"""Environments may fetch their data first."""
SILENCE_GRACE_S = 30.0
"""Episodes end by their own deadline; a worker that is silent for so much longer hangs."""
RETRY_PAUSE_S = 0.2
"""Between two attempts at a group, so that a broken worker cannot spin."""
MOST_FRUITLESS = 5
"""Attempts at a group in a row that brought nothing."""
ASK_ATTEMPTS = 5
"""Workers that may die of the same question."""


@dataclass(slots=True)
class Lease:
    """A group in a worker's hands. Invariant: a group has one lease at a time, and only its parts are taken.

    Each part that arrives renews it; `silence_s` after the last one the worker is ended and the rest leased anew.
    """

    group: int
    worker: str
    attempt: int
    """From 0."""
    num_missing: int
    since: float
    """Time of the event loop's clock, like `renewed`."""
    renewed: float


class Crew:
    """Invariant: a handed-out group is worked on until all its samples arrived, whatever happens to workers."""

    def __init__(self, spawn: Spawn, episode_timeout_s: float) -> None:
        self._spawn = spawn
        self._silence_s = episode_timeout_s + SILENCE_GRACE_S
        self._names = itertools.count()
        self._engines: Mapping[str, Handle] = {}
        self._busy: dict[str, int] = {}
        self._arrived = asyncio.Event()
        self._freed = asyncio.Event()
        self.coming: dict[str, float] = {}
        """Workers that are being started, and since when on the event loop's clock."""
        self.members: dict[str, Handle] = {}
        """Workers that are given groups."""
        self.leaving: dict[str, Handle] = {}
        """Workers that finish their groups and are given no others."""
        self.leases: dict[int, Lease] = {}
        self.num_prompts: dict[str, dict[str, int]] = {}
        """Prompts by environment and split, as the workers found them."""
        self.num_reissued = 0

    async def add(self) -> str:
        """Start one more worker and return its name. WorkerFailed or ConfigError in one sentence."""
        name = f"rollout-{next(self._names)}"
        self.coming[name] = asyncio.get_running_loop().time()
        try:
            await self._add(name)
        finally:
            del self.coming[name]
        return name

    async def _add(self, name: str) -> None:
        handle = await self._spawn(name)
        try:
            self.num_prompts = await start_of(handle, START_DEADLINE_S)
        except BaseException:
            await handle.kill()
            raise
        # Known first and told second: engines may change while it is being told.
        self.members[name] = handle
        self._busy[name] = 0
        await self.use_engines(self._engines)
        self._arrived.set()

    async def use_engines(self, handles: Mapping[str, Handle]) -> None:
        self._engines = handles
        workers = [*self.members.values(), *self.leaving.values()]
        told = (handle.call("use_engines", handles, deadline_s=60.0) for handle in workers)
        await asyncio.gather(*told, return_exceptions=True)

    async def lost(self, name: str) -> bool:
        """Take a broken worker out and end it; return whether it was still in, and so is to be replaced."""
        handle = self.members.pop(name, None)
        was_in = handle is not None
        handle = handle or self.leaving.pop(name, None)
        if handle is not None:
            await handle.kill()
        return was_in

    async def release(self, name: str) -> None:
        """Let a worker finish its groups and go; what it has not finished by then is leased anew."""
        handle = self.members.pop(name, None)
        if handle is None:
            return
        self.leaving[name] = handle
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s):
                    while self._busy[name]:
                        self._freed.clear()
                        await self._freed.wait()
        finally:
            self.leaving.pop(name, None)
            await handle.kill()

    def num_leased(self, name: str) -> int:
        """Return how many groups a worker is working on."""
        return self._busy.get(name, 0)

    async def run(self, request: GroupRequest, missing: Callable[[], tuple[int, ...]]) -> AsyncIterator[Part]:
        """Yield the group's prompt and trajectories; after a failure only what `missing` still names is made again.

        Raises WorkerFailed when attempts keep failing without anything new arriving.
        """
        fruitless = 0
        for attempt in itertools.count():
            if not (samples := missing()):
                return
            try:
                async for part in self._attempt(replace(request, samples=samples, attempt=attempt)):
                    yield part
            except WorkerFailed as error:
                self.num_reissued += 1
                fruitless = fruitless + 1 if len(missing()) == len(samples) else 0
                if fruitless > MOST_FRUITLESS:
                    raise WorkerFailed(f"group {request.number} failed {fruitless} times in a row: {error}") from error
                await asyncio.sleep(RETRY_PAUSE_S * 2**fruitless)

    async def _attempt(self, request: GroupRequest) -> AsyncIterator[Part]:
        handle = await self._pick()
        now = asyncio.get_running_loop().time()
        self.leases[request.number] = lease = Lease(
            group=request.number,
            worker=handle.name,
            attempt=request.attempt,
            num_missing=len(request.samples),
            since=now,
            renewed=now,
        )
        try:
            async for part in self._parts(handle, request):
                lease.renewed = asyncio.get_running_loop().time()
                lease.num_missing -= isinstance(part, Trajectory)
                yield part
        finally:
            self.leases.pop(request.number, None)
            self._let_go(handle)

    async def probe(self, draws: Sequence[tuple[str, int]], max_new_tokens: int, deadline_s: float) -> list[Completion]:
        """Return a short completion of each (environment, index) of the training split; WorkerFailed."""
        return await self.ask_any("probe", draws, max_new_tokens, deadline_s=deadline_s)

    async def ask_any(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Return what a worker answers; another one is asked when it dies. WorkerFailed."""
        dead: set[str] = set()
        while True:
            handle = await self._pick(dead)
            try:
                return await handle.call(method, *args, deadline_s=deadline_s)
            except WorkerDied:
                dead.add(handle.name)
                if len(dead) == ASK_ATTEMPTS or (self.members.keys() <= dead and not self.coming):
                    raise
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** len(dead))  # until whoever watches has taken it out
            finally:
                self._let_go(handle)

    async def _pick(self, dead: Collection[str] = ()) -> Handle:
        """Return the worker with the fewest groups, which now has one more; none of the `dead` if there is another."""
        while not self.members:
            self._arrived.clear()
            await self._arrived.wait()  # freed by `add`, which the keeper calls for every lost worker
        name = min(self.members, key=lambda name: (name in dead, self._busy[name]))
        self._busy[name] += 1
        return self.members[name]

    def _let_go(self, handle: Handle) -> None:
        self._busy[handle.name] -= 1
        self._freed.set()

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
