"""One request on its way through vLLM."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from areal.contracts.messages import Completion, FinishReason, GenerateRequest, Version


class Running:
    """Invariant: tokens, logprobs and versions have the same length; the future is answered once."""

    __slots__ = ("adapter", "future", "logprobs", "loop", "params", "request", "tokens", "uid", "versions")

    def __init__(self, uid: str, request: GenerateRequest, params: Any) -> None:
        self.uid = uid
        """Unique in this engine, whatever callers call their requests."""
        self.request = request
        self.params = params
        self.adapter: Any = None
        """vLLM's LoRARequest that it began with."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[Version] = []
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Completion] = self.loop.create_future()

    def add(self, output: Any, version: Version) -> None:
        """Take the tokens of one step."""
        for token, table in zip(output.token_ids, output.logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(table[token].logprob)
            self.versions.append(version)

    def finish(self, reason: FinishReason) -> None:
        """Answer with what there is; from any thread."""
        completion = Completion(
            uid=self.request.uid,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=reason,
        )
        answer(self.loop, self.future, completion, None)

    def fail(self, error: Exception) -> None:
        """Answer with an error; from any thread."""
        answer(self.loop, self.future, None, error)


def answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Answer a future of `loop` from another thread; nobody may be waiting any more."""

    def settle() -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    with suppress(RuntimeError):  # the loop has ended, and with it everybody who could wait
        loop.call_soon_threadsafe(settle)
