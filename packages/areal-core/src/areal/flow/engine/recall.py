"""What an engine was asked lately: a rollout worker that dies in the middle of an answer costs none of its tokens."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from areal.contracts.messages import Completion, GenerateRequest

MOST_BYTES = 20 << 20
"""Of finished answers that are kept, with their questions: whoever asks anew does so within seconds."""
ENTRY_BYTES, PROMPT_TOKEN_BYTES, TOKEN_BYTES = 1000, 40, 80
"""Of an answer, of each of its prompt's tokens, and of each sampled one with logprob and version."""

Generate = Callable[[GenerateRequest], Awaitable[Completion]]


class Recall:
    """Invariant: a completion is recalled only for the very request that it answers, under the same uid.

    Whoever waits for an answer may die without a word: the engine goes on, and a successor finds what it makes.
    """

    def __init__(self, generate: Generate, most_bytes: int = MOST_BYTES) -> None:
        self._generate = generate
        self._most_bytes = most_bytes
        self._running: dict[str, tuple[GenerateRequest, asyncio.Future[Completion]]] = {}
        self._finished: OrderedDict[str, tuple[GenerateRequest, Completion]] = OrderedDict()
        self._num_bytes = 0
        self.num_recalled = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Have the engine answer, and remember the answer; a caller that is cancelled takes its request back."""
        running = asyncio.ensure_future(self._generate(request))
        self._running[request.uid] = request, running
        try:
            completion = await running
        finally:
            if self._running.get(request.uid, (None, None))[1] is running:
                del self._running[request.uid]
        if completion.finish_reason != "interrupted":
            self._remember(request, completion)
        return completion

    def knows(self, request: GenerateRequest) -> bool:
        """Return whether this very request is being answered here, or was lately."""
        return any(there.get(request.uid, (None,))[0] == request for there in (self._running, self._finished))

    async def recall(self, request: GenerateRequest) -> Completion | None:
        """Return the answer to a request that an earlier caller made; None when it is not known any more."""
        if not self.knows(request):
            return None
        asked, running = self._running.get(request.uid, (None, None))
        if asked == request and running is not None:
            await asyncio.wait([running])  # and not `await running`: this caller's end is not the request's
            if running.cancelled() or running.exception() is not None:
                return None
            completion = running.result()
        else:
            completion = self._finished[request.uid][1]
        self.num_recalled += 1
        return completion

    def _remember(self, request: GenerateRequest, completion: Completion) -> None:
        _, before = self._finished.pop(request.uid, (None, None))
        self._num_bytes += _size(completion) - (_size(before) if before else 0)
        self._finished[request.uid] = request, completion
        while self._num_bytes > self._most_bytes:
            _, (_, oldest) = self._finished.popitem(last=False)
            self._num_bytes -= _size(oldest)


def _size(completion: Completion) -> int:
    """Return about how many bytes an answer takes, its question included."""
    return ENTRY_BYTES + PROMPT_TOKEN_BYTES * len(completion.prompt_ids) + TOKEN_BYTES * len(completion.token_ids)
