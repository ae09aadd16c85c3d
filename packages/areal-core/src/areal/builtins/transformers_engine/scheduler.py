"""Who runs next: plain bookkeeping of requests, without tensors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from areal.contracts.messages import Completion, FinishReason, GenerateRequest, Version
from areal.errors import ArealError

_REFILL_SHARE = 8
"""A prefill costs about as much as a decode of the whole batch, so that single freed slots wait for others until an
eighth of the slots is free; at most an eighth of the batch idles meanwhile."""
_MAX_PADDING = 0.25
"""Prompts of different length share a prefill pass as long as padding is at most this share of it."""
_FREE_PADDING_TOKENS = 256
"""In a pass this small padding costs less than another pass."""


class Row:
    """One request and what it has produced. Invariant: tokens, logprobs and versions have the same length."""

    __slots__ = ("future", "limit", "logprobs", "request", "stops", "tokens", "versions")

    def __init__(self, request: GenerateRequest, stops: frozenset[int], future: asyncio.Future[Completion]) -> None:
        self.request = request
        self.stops = stops
        self.limit = request.sampling.max_new_tokens
        self.future = future
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[Version] = []

    @property
    def length(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def add(self, token: int, logprob: float, version: Version) -> FinishReason | None:
        """Append a sampled token and return why the row ends with it, if it does."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def finish(self, reason: FinishReason) -> None:
        if not self.future.done():
            request = self.request
            self.future.set_result(
                Completion(
                    uid=request.uid,
                    prompt_ids=request.prompt_ids,
                    token_ids=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish_reason=reason,
                )
            )

    def fail(self, error: ArealError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Prefill:
    """The rows of one prefill pass. Invariant: row i continues ``contexts[sources[i]]``; equal contexts stand once.

    The samples of one group have the same prompt: it is computed once and copied to their slots.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.contexts: list[tuple[int, ...]] = []
        self.sources: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._num_tokens = 0
        self._longest = 0

    def add(self, row: Row, max_tokens: int) -> bool:
        """Take the row, unless the pass would exceed `max_tokens` or pad too much; the first always fits."""
        context = row.request.prompt_ids + tuple(row.tokens)
        place = self._places.get(context)
        if place is None:
            place = len(self.contexts)
            longest = max(self._longest, len(context))
            padded, used = longest * (place + 1), self._num_tokens + len(context)
            too_padded = padded - used > max(_FREE_PADDING_TOKENS, _MAX_PADDING * padded)
            if place and (padded > max_tokens or too_padded):
                return False
            self._longest, self._num_tokens = longest, used
            self._places[context] = place
            self.contexts.append(context)
        self.rows.append(row)
        self.sources.append(place)
        return True


class Scheduler:
    """Invariant: an unfinished row is either waiting or running, and ``running[i]`` lives in slot i of the cache."""

    def __init__(self, max_batch: int, max_prefill_tokens: int, max_kv_tokens: int) -> None:
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._max_kv_tokens = max_kv_tokens

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def kv_usage(self) -> float:
        """Share of `max_kv_tokens` that running rows fill."""
        return min(1.0, sum(row.length for row in self.running) / self._max_kv_tokens)

    def admit(self) -> Prefill | None:
        """Move rows from `waiting` to the end of `running` and return their prefill pass, or None.

        The oldest waiting row is always in it; younger ones join when they fit beside it.
        """
        free = self._max_batch - len(self.running)
        if not self.waiting or free < min(len(self.waiting), -(-self._max_batch // _REFILL_SHARE)):
            return None
        prefill = Prefill()
        longest = max((row.length for row in self.running), default=0)
        left: list[Row] = []
        for _ in range(min(free, len(self.waiting))):
            row = self.waiting[0]
            num_rows = len(self.running) + len(prefill.rows) + 1
            # Two: room for the token about to be sampled and one more, or the row would soon be sent back.
            longest = max(longest, row.length + 2)
            if num_rows > 1 and num_rows * longest > self._max_kv_tokens:
                break
            self.waiting.popleft()
            if not prefill.add(row, self._max_prefill_tokens):
                left.append(row)
        self.waiting.extendleft(reversed(left))
        self.running.extend(prefill.rows)
        return prefill if prefill.rows else None

    def overflow(self, length: int) -> list[Row]:
        """Return the rows to send back, youngest first, before all could hold `length` tokens; one may always go on."""
        num_kept = max(1, self._max_kv_tokens // length)
        if len(self.running) <= num_kept:
            return []
        return sorted(self.running, key=lambda row: len(row.tokens))[: len(self.running) - num_kept]

    def remove(self, rows: Iterable[Row]) -> list[tuple[int, int]]:
        """Take rows off `running`, fill their slots from the end, return the moves (source slot, target slot)."""
        gone = set(map(id, rows))
        if not gone:
            return []
        num_left = sum(id(row) not in gone for row in self.running)
        holes = [slot for slot in range(num_left) if id(self.running[slot]) in gone]
        sources = [slot for slot in range(num_left, len(self.running)) if id(self.running[slot]) not in gone]
        for source, hole in zip(sources, holes, strict=True):
            self.running[hole] = self.running[source]
        del self.running[num_left:]
        return list(zip(sources, holes, strict=True))

    def send_back(self, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """Put running rows at the head of the queue, to be prefilled anew with what they have; return the moves."""
        moves = self.remove(rows)
        self.waiting.extendleft(reversed(rows))
        return moves

    def drop(self, row: Row) -> list[tuple[int, int]]:
        """Forget a row whose caller has gone away; return the moves."""
        if row in self.waiting:
            self.waiting.remove(row)
            return []
        return self.remove([row] if row in self.running else [])
