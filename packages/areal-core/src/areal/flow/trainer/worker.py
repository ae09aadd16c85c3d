"""The trainer's data plane: one rank's backend, the algorithm, and what turns groups into updates."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.contracts.algorithm import Algorithm, NormalizesBatch
from areal.contracts.backend import Backend, Closes
from areal.contracts.component import Component, import_object
from areal.contracts.messages import Batch, Group, Row, Version
from areal.contracts.specs import BackendContext
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.flow.trainer.rows import has_advantage, mask_stale, rows_of

Demonstration = tuple[tuple[int, ...], tuple[int, ...]]
"""(prompt ids, answer ids)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One training step's work. Invariant: the same request on the same weights gives the same update."""

    step: int
    version: Version
    """The trainer's weights before the step."""
    groups: tuple[Group, ...]
    oldest_version: Version | None = None
    """Tokens sampled before this version are masked out of the loss; None masks nothing."""


class TrainerWorker:
    """Invariant: between two calls the backend's weights are those of exactly one version."""

    def __init__(
        self,
        backend: Component,
        backend_options: Any,
        context: BackendContext,
        algorithm: Component,
        algorithm_options: Any,
        temperature: float,
    ) -> None:
        self._context = context
        self._temperature = temperature
        self._backend: Backend = backend.load()(backend_options, context)
        self._algorithm: Algorithm = algorithm.load()(algorithm_options)

    def prepare(self, function: str, *args: Any) -> Any:
        """Run the function that a dotted path names in this process, where heavy libraries are at home anyway."""
        return import_object(function)(*args)

    def start(self) -> Layout:
        self._backend.start()
        return self._backend.layout()

    def warm_up(self, demonstrations: Sequence[Demonstration], algorithm: Component, learning_rate: float) -> float:
        """Make one supervised update on (prompt ids, answer ids) pairs and return its loss."""
        rows = tuple(_demonstration_row(prompt, answer) for prompt, answer in demonstrations)
        loss: Algorithm = algorithm.load()(algorithm.parse_options({}))
        batch = Batch(rows=rows, num_tokens=sum(row.num_loss_tokens for row in rows), num_sequences=len(rows))
        return float(self._backend.train_step(batch, loss, learning_rate)["loss"])

    def train(self, request: TrainRequest) -> dict[str, float]:
        """Make one training step and return its metrics."""
        began = time.perf_counter()
        rows: list[Row] = []
        for group in request.groups:
            rows += rows_of(group, self._algorithm.advantages(group))
        num_masked = 0
        if request.oldest_version is not None:
            masked = [mask_stale(row, request.oldest_version) for row in rows]
            rows = [row for row, _ in masked]
            num_masked = sum(taken for _, taken in masked)
        if isinstance(self._algorithm, NormalizesBatch):
            rows = self._algorithm.normalize(rows)
        metrics = self._update(rows, request.step)
        return metrics | {"staleness/masked_tokens": float(num_masked), "time/train_s": time.perf_counter() - began}

    def _update(self, rows: Sequence[Row], step: int) -> dict[str, float]:
        order = list(rows)
        num_minibatches = self._context.training.minibatches
        if num_minibatches > 1:
            random.Random(f"{self._context.seed}/{step}").shuffle(order)
            everything = self._batch(order)
            order = [
                row.with_proximal(logprobs)
                for row, logprobs in zip(order, self._backend.logprobs(everything), strict=True)
            ]
        sums: dict[str, float] = defaultdict(float)
        num_skipped_rows = 0
        for number in range(num_minibatches):
            batch = self._batch(order[number::num_minibatches])
            useful = self._useful(batch)
            num_skipped_rows += len(batch.rows) - len(useful.rows)
            for name, value in self._backend.train_step(useful, self._algorithm).items():
                sums[name] += value / num_minibatches
        return {_metric(name): value for name, value in sums.items()} | {
            "rows/without_advantage": float(num_skipped_rows)
        }

    def _batch(self, rows: Sequence[Row]) -> Batch:
        return Batch(
            rows=tuple(rows),
            num_tokens=sum(row.num_loss_tokens for row in rows),
            num_sequences=len(rows),
            temperature=self._temperature if self._temperature > 0 else 1.0,
        )

    def _useful(self, batch: Batch) -> Batch:
        """Leave out rows that cannot give a gradient; the batch's totals still count them."""
        if not self._algorithm.needs_advantage:
            return batch
        return replace(batch, rows=tuple(row for row in batch.rows if has_advantage(row) and row.num_loss_tokens))

    def send(self, transfer: Transfer) -> Receipt:
        return self._backend.send(transfer)

    def save(self, path: str) -> None:
        self._backend.save(path)

    def load(self, path: str) -> None:
        self._backend.load(path)

    def close(self) -> None:
        if isinstance(self._backend, Closes):
            self._backend.close()


def _demonstration_row(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Row:
    num_prompt, num_answer = len(prompt), len(answer)
    return Row(
        token_ids=prompt + answer,
        loss_mask=(False,) * num_prompt + (True,) * num_answer,
        logprobs=(0.0,) * (num_prompt + num_answer),
        versions=(-1,) * num_prompt + (0,) * num_answer,
        advantages=(0.0,) * num_prompt + (1.0,) * num_answer,
    )


def _metric(name: str) -> str:
    return name if "/" in name else f"train/{name}"
