"""One engine step: admit and prefill, or decode everything that runs; sample; let finished rows go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.builtins.transformers_engine.model import CausalModel
from areal.builtins.transformers_engine.sampling import SamplingRows
from areal.builtins.transformers_engine.scheduler import Prefill, Row, Scheduler
from areal.contracts.messages import FinishReason, Version
from areal.errors import ArealError


@dataclass(slots=True)
class DecodeBatch:
    """What the next decode feeds. Invariant: row i is ``running[i]``; made anew whenever a row comes or goes."""

    tokens: Tensor
    """[n] int64, each row's last token."""
    positions: Tensor
    """[n] int64, where it stands."""
    length: int
    """Tokens of the longest row: the highest position + 1."""
    sampling: SamplingRows


class Batcher:
    """Invariant: between steps every running row's cache holds all its tokens but the last, which is fed next."""

    def __init__(self, model: CausalModel, scheduler: Scheduler) -> None:
        self.version: Version = 0
        self.num_tokens = 0
        """Tokens sampled since the start."""
        self.num_steps = 0
        """Forward passes since the start."""
        self._model = model
        self._scheduler = scheduler
        self._batch: DecodeBatch | None = None

    @torch.inference_mode()
    def step(self) -> None:
        """Run one forward pass; raises ArealError when logits are not finite, and whatever the model raises."""
        prefill = self._scheduler.admit()
        if prefill is not None:
            self._prefill(prefill)
        elif self._scheduler.running:
            self._decode()

    def recompute(self) -> None:
        """Send all running rows back to be prefilled with the current weights; their tokens stay."""
        self._follow(self._scheduler.send_back(list(self._scheduler.running)))

    def drop(self, row: Row) -> None:
        """Forget a row whose caller has gone away."""
        self._follow(self._scheduler.drop(row))

    def interrupt(self) -> None:
        """Return the running rows to their callers as they are."""
        for row in self._clear():
            row.finish("interrupted")

    def fail(self, error: ArealError) -> None:
        """Fail the running rows and empty the cache: what a failed pass left in it cannot be trusted.

        When none runs, admitting failed: the waiting rows would meet the same error for ever.
        """
        rows = self._clear()
        if not rows:
            rows = list(self._scheduler.waiting)
            self._scheduler.waiting.clear()
        for row in rows:
            row.fail(error)
        self._model.forget()

    def forget_batch(self) -> None:
        """Free what the next decode would feed: it is gathered anew from the rows."""
        self._batch = None

    def _clear(self) -> list[Row]:
        rows = list(self._scheduler.running)
        self._follow(self._scheduler.remove(rows))
        return rows

    def _prefill(self, prefill: Prefill) -> None:
        start = len(self._scheduler.running) - len(prefill.rows)
        logits = self._model.prefill(start, prefill.contexts, prefill.sources)
        self._batch = None
        self._accept(prefill.rows, *self._sampling(prefill.rows).sample(logits))

    def _decode(self) -> None:
        batch = self._batch or self._gather()
        if overflow := self._scheduler.overflow(batch.length):
            self._follow(self._scheduler.send_back(overflow))
            batch = self._gather()
        logits = self._model.decode(batch.tokens, batch.positions, batch.length)
        tokens, logprobs = batch.sampling.sample(logits)
        self._batch = DecodeBatch(tokens, batch.positions + 1, batch.length + 1, batch.sampling)
        self._accept(self._scheduler.running, tokens, logprobs)

    def _gather(self) -> DecodeBatch:
        rows, device = self._scheduler.running, self._model.device
        lengths = [row.length for row in rows]
        tokens = torch.tensor([row.tokens[-1] for row in rows], device=device)
        return DecodeBatch(tokens, torch.tensor(lengths, device=device) - 1, max(lengths), self._sampling(rows))

    def _sampling(self, rows: Sequence[Row]) -> SamplingRows:
        requests = [row.request for row in rows]
        return SamplingRows.of(
            [request.sampling for request in requests],
            [request.seed for request in requests],
            [len(row.tokens) for row in rows],
            self._model.device,
        )

    def _accept(self, rows: Sequence[Row], tokens: Tensor, logprobs: Tensor) -> None:
        """Give each row its token ([n] int64) and logprob ([n] float32), and let the finished ones go."""
        values = logprobs.tolist()
        if math.isnan(sum(values)):
            raise ArealError(f"the model's logits are not finite under weights of version {self.version}")
        finished: list[tuple[Row, FinishReason]] = []
        for row, token, logprob in zip(rows, tokens.tolist(), values, strict=True):
            reason = row.add(token, logprob, self.version)
            if reason is not None:
                finished.append((row, reason))
        self.num_tokens += len(rows)
        self.num_steps += 1
        if finished:
            self._follow(self._scheduler.remove([row for row, _ in finished]))
            for row, reason in finished:
                row.finish(reason)

    @torch.inference_mode()
    def _follow(self, moves: list[tuple[int, int]]) -> None:
        """Do in the cache what the scheduler has done to the running rows."""
        self._batch = None
        self._model.cache.move(moves)
