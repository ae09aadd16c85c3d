"""The engines as a rollout worker sees them: pick the least busy, go on elsewhere when one dies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from areal.contracts.cluster import Handle
from areal.contracts.messages import Completion, GenerateRequest
from areal.errors import WorkerDied, WorkerFailed

RECALL_DEADLINE_S = 5.0
"""For an engine to say whether it knows a request; beyond it the request is made anew."""


class Queues:
    """How many requests each engine has. Invariant: `least` names one with the fewest; no method looks at all engines.

    Among equals it is the one whose number changed the longest ago, so that all have their turn.
    """

    def __init__(self, running: Mapping[str, int]) -> None:
        self._running: dict[str, int] = {}
        self._names: dict[int, dict[str, None]] = {}
        """Engines by their number of requests, in the order in which they came to have it."""
        for name, number in running.items():
            self._put(name, number)
        self._fewest = min(self._names, default=0)

    def get(self, name: str) -> int:
        """Return an engine's requests; 0 for one that is not here."""
        return self._running.get(name, 0)

    def least(self) -> str:
        return next(iter(self._names[self._fewest]))

    def add(self, name: str) -> None:
        """Count one more request."""
        number = self._take(name)
        self._put(name, number + 1)
        if number == self._fewest and number not in self._names:
            self._fewest = number + 1

    def end(self, name: str) -> None:
        """Count one request less; of an engine that left meanwhile nothing is counted."""
        if name in self._running:
            number = self._take(name) - 1
            self._put(name, number)
            self._fewest = min(self._fewest, number)

    def remove(self, name: str) -> None:
        self._take(name)
        del self._running[name]
        self._fewest = min(self._names, default=0)

    def _put(self, name: str, number: int) -> None:
        self._running[name] = number
        self._names.setdefault(number, {})[name] = None

    def _take(self, name: str) -> int:
        number = self._running[name]
        del self._names[number][name]
        if not self._names[number]:
            del self._names[number]
        return number


class EnginePool:
    """Invariant: a request ends with a whole completion, or waits while there is no engine; it is never lost.

    A completion that an engine had to interrupt goes on at the next engine from its partial tokens, which keep
    their logprobs and versions.
    """

    def __init__(self) -> None:
        self._handles: dict[str, Handle] = {}
        self._queues = Queues({})
        self._arrived = asyncio.Event()

    def replace(self, handles: Mapping[str, Handle]) -> None:
        """Use these engines from now on; requests at engines that left end when their engines do."""
        self._handles = dict(handles)
        self._queues = Queues({name: self._queues.get(name) for name in handles})
        if handles:
            self._arrived.set()
        else:
            self._arrived.clear()

    async def recall(self, request: GenerateRequest) -> Completion:
        """Return the completion that an earlier attempt at the same episode asked for, if an engine still has it.

        Otherwise it is made. Raises what `generate` raises.
        """
        handles = list(self._handles.values())
        known = await asyncio.gather(*(_knows(handle, request) for handle in handles))
        for handle in itertools.compress(handles, known):
            with suppress(WorkerFailed):
                completion: Completion | None = await handle.call("recall", request)
                if completion is not None and completion.finish_reason != "interrupted":
                    return completion
                return await self.generate(request, completion)
        return await self.generate(request)

    async def generate(self, request: GenerateRequest, partial: Completion | None = None) -> Completion:
        """Return the completion, which begins with `partial`, an interrupted one.

        Raises what the engine says is wrong with the request (ArealError).
        """
        while True:
            remaining = request if partial is None else _remainder(request, partial)
            name, handle = await self._pick()
            self._queues.add(name)
            try:
                completion: Completion = await handle.call("generate", remaining)
            except WorkerDied:
                self._forget(name, handle)
                continue
            finally:
                self._queues.end(name)
            whole = completion if partial is None else _joined(partial, completion)
            if completion.finish_reason != "interrupted":
                return whole
            if len(whole.token_ids) >= request.sampling.max_new_tokens:
                return replace(whole, finish_reason="length")  # interrupted after its last token: nothing is left
            partial = whole
            await asyncio.sleep(0.01)  # the engine that interrupts is about to leave; give the controller its turn

    async def _pick(self) -> tuple[str, Handle]:
        while not self._handles:
            # The episode's own deadline ends this wait and names the episode.
            self._arrived.clear()
            await self._arrived.wait()
        name = self._queues.least()
        return name, self._handles[name]

    def _forget(self, name: str, handle: Handle) -> None:
        if self._handles.get(name) is handle:
            del self._handles[name]
            self._queues.remove(name)


def _remainder(request: GenerateRequest, partial: Completion) -> GenerateRequest:
    done = len(partial.token_ids)
    return replace(
        request,
        prompt_ids=request.prompt_ids + partial.token_ids,
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - done),
        seed=request.seed + done,
    )


def _joined(first: Completion, second: Completion) -> Completion:
    return replace(
        second,
        prompt_ids=first.prompt_ids,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=first.versions + second.versions,
    )


async def _knows(engine: Handle, request: GenerateRequest) -> bool:
    try:
        return await engine.call("knows", request, deadline_s=RECALL_DEADLINE_S)
    except WorkerFailed:
        return False
