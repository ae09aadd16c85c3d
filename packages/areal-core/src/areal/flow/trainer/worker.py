"""The trainer's data plane: one rank's backend, the algorithm, and what turns groups into updates."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.contracts.algorithm import Algorithm, Needs, RefinesAdvantages, UsesCritic
from areal.contracts.backend import Backend, Closes, Offloads, SavesInBackground, SendsInBackground
from areal.contracts.component import OFFLOAD, Component, import_object
from areal.contracts.messages import Batch, Completion, Group, Row, Version
from areal.contracts.resharder import Interrupts
from areal.contracts.specs import BackendContext
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.errors import ArealError, JournalError, PluginError
from areal.flow.trainer.checksums import check
from areal.flow.trainer.critic import Critic, make_critic
from areal.flow.trainer.parity import compared
from areal.flow.trainer.reference import Reference, make_reference
from areal.flow.trainer.rendezvous import Rendezvous, meeting_at
from areal.flow.trainer.rows import has_advantage, mask_stale, row_of, rows_of

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

    @classmethod
    def of(cls, step: int, groups: Sequence[Group], *, masked_beyond: int | None) -> TrainRequest:
        """Return the request of training step `step` (from 1).

        `masked_beyond`: staleness above which tokens are masked out of the loss; None: all count.
        """
        version = step - 1
        oldest = None if masked_beyond is None else version - masked_beyond
        return cls(step=step, version=version, groups=tuple(groups), oldest_version=oldest)


class TrainerWorker:
    """One rank. Invariant: between two calls the backend's weights are those of exactly one version.

    All ranks get the same calls and make the same of them, so that their collectives meet.
    """

    def __init__(
        self,
        backend: Component,
        backend_options: Any,
        context: BackendContext,
        algorithm: Component,
        algorithm_options: Any,
        temperature: float,
    ) -> None:
        self._component = backend
        self._options = backend_options
        self._context = context
        self._temperature = temperature if temperature > 0 else 1.0
        self._make = backend.load()
        self._algorithm: Algorithm = algorithm.load()(algorithm_options)
        self._needs = _needs_of(self._algorithm, algorithm.name)
        self._backend: Backend
        self._instances: list[Backend] = []
        self._reference: Reference | None = None
        self._critic: Critic | None = None
        self._rendezvous: Rendezvous | None = None
        self._sent: Receipt | None = None

    def prepare(self, function: str, *args: Any) -> Any:
        """Run the function that a dotted path names in this process, where heavy libraries are at home anyway.

        JournalError when it fails: it writes into the run's folder, and libraries have errors of their own for that.
        """
        with _failing_as_one():
            return import_object(function)(*args)

    def rendezvous(self) -> str:
        """Return ``host:port`` of this machine, where all ranks are to meet; kept free until `start`."""
        if self._rendezvous is not None:
            self._rendezvous.release()
        self._rendezvous = Rendezvous()
        return self._rendezvous.where

    def make(self, rendezvous: str = "") -> None:
        """Make the backend and its companions; ConfigError when they cannot be what the algorithm needs.

        `rendezvous`: where the ranks meet; empty for one rank.
        """
        self._context = context = replace(self._context, rendezvous=rendezvous)

        def instance(context: BackendContext) -> Backend:
            self._instances.append(self._make(self._options, context))
            return self._instances[-1]

        self._backend = instance(context)
        self._reference = make_reference(self._needs.reference, self._backend, self._component.name, instance, context)
        if isinstance(self._algorithm, UsesCritic):
            self._critic = make_critic(self._algorithm, self._component, instance, context)

    def start(self) -> Layout:
        """Load the model; TrainerLost when another program has taken the port where the ranks were to meet."""
        if self._rendezvous is not None:
            self._rendezvous.release()
        with meeting_at(self._context.rendezvous):
            for each in (self._backend, self._reference, self._critic):
                if each is not None:
                    each.start()
        return self._backend.layout()

    def parity(self, completions: Sequence[Completion]) -> dict[str, float]:
        """Compare the engines' logprobs of these completions with those of the current weights."""
        rows = [row_of(completion) for completion in completions if completion.token_ids]
        return compared(rows, self._backend.logprobs(_batch(rows, 0, self._temperature)))

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
        rows = self._refined(rows, request.version)
        metrics = self._update(rows, request)
        if self._critic is not None:
            metrics |= self._critic.judged(rows)
        return metrics | {"staleness/masked_tokens": float(num_masked), "time/train_s": time.perf_counter() - began}

    def _refined(self, rows: list[Row], version: Version) -> list[Row]:
        """Return the rows with everything that is known before the first update."""
        refines = isinstance(self._algorithm, RefinesAdvantages)
        if self._reference is not None:
            self._reference.begin(version)
            read = [refines or not self._needs.advantage or has_advantage(row) for row in rows]
            wanted = [row for row, is_read in zip(rows, read, strict=True) if is_read]
            found = iter(self._reference.logprobs(_batch(wanted, version, self._temperature)))
            rows = [
                replace(row, reference_logprobs=next(found)) if is_read else row
                for row, is_read in zip(rows, read, strict=True)
            ]
        if self._critic is not None:
            values = self._critic.values(_batch(rows, version, self._temperature))
            rows = [replace(row, values=found) for row, found in zip(rows, values, strict=True)]
        return self._algorithm.refine(rows) if isinstance(self._algorithm, RefinesAdvantages) else rows

    def _update(self, rows: list[Row], request: TrainRequest) -> dict[str, float]:
        num_minibatches = self._context.training.minibatches
        if num_minibatches > 1 and self._needs.proximal:
            proximal = self._backend.logprobs(_batch(rows, request.version, self._temperature))
            rows = [row.with_proximal(logprobs) for row, logprobs in zip(rows, proximal, strict=True)]
        steps: list[Mapping[str, float]] = []
        num_skipped_rows = 0
        seed = f"{self._context.seed}/{request.step}"
        for number, part in enumerate(_minibatches(rows, num_minibatches, seed, self._needs.whole_groups)):
            batch = replace(_batch(part, request.version, self._temperature), first_update=number == 0)
            useful = replace(_useful(batch, self._needs), whole_groups=self._needs.whole_groups)
            num_skipped_rows += len(batch.rows) - len(useful.rows)
            statistics = self._backend.train_step(useful, self._algorithm)
            metrics = {_metric(name): value for name, value in statistics.items()}
            steps.append({**metrics, **(self._critic.train(batch) if self._critic is not None else {})})
        return _mean(steps) | {"rows/without_advantage": float(num_skipped_rows)}

    def offload(self) -> None:
        """Give the device's memory of all models to the engines."""
        for backend in self._instances:
            _offloading(backend).offload()

    def onload(self) -> None:
        """Take it again."""
        for backend in self._instances:
            _offloading(backend).onload()

    def begin_send(self, transfer: Transfer) -> None:
        """Have the weights sent as they are now, or where the backend can so much of it that they may change again."""
        self._sent = None
        if transfer.overlaps and isinstance(self._backend, SendsInBackground):
            self._backend.begin_send(transfer)
        else:
            self._sent = self._backend.send(transfer)

    async def finish_send(self) -> Receipt:
        """Wait until all is sent, beside whatever else this rank does."""
        if self._sent is not None:
            return self._sent
        assert isinstance(self._backend, SendsInBackground)
        return await asyncio.to_thread(self._backend.finish_send)

    async def interrupt(self) -> None:
        """Make what is being sent wait no longer for receivers that are gone, where backend and resharder can."""
        for backend in self._instances[:1]:
            if isinstance(backend, Interrupts):
                backend.interrupt()

    def save(self, path: str) -> None:
        """Write the state into the folder `path`; JournalError, whatever a library's own error is.

        All of it is there once `finish_save` has returned, too.
        """
        with _failing_as_one():
            self._backend.save(path)
            if self._critic is not None:
                self._critic.save(path)

    async def finish_save(self) -> None:
        """Wait until the last `save` is whole, beside whatever else this rank does; JournalError."""
        with _failing_as_one():
            for backend in self._instances:
                if isinstance(backend, SavesInBackground):
                    await asyncio.to_thread(backend.finish_save)

    def verify(self, path: str) -> None:
        """Look for damage in this rank's share of a checkpoint's files: JournalError."""
        check(Path(path), self._context.rank, self._context.world_size)

    def load(self, path: str) -> None:
        """Restore what `save` wrote; JournalError when it is missing."""
        self._backend.load(path)
        if self._critic is not None:
            self._critic.load(path)

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.release()
        for backend in reversed(self._instances):  # the first may hold what the others' groups were made from
            if isinstance(backend, Closes):
                backend.close()


@contextmanager
def _failing_as_one() -> Generator[None]:
    """Let what cannot be written be a JournalError of one line."""
    try:
        yield
    except ArealError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise JournalError(
            f"the trainer could not write into the run's folder: {type(error).__name__}: {said}"
        ) from error


def _batch(rows: Sequence[Row], version: Version, temperature: float) -> Batch:
    return Batch(
        rows=tuple(rows),
        num_tokens=sum(row.num_loss_tokens for row in rows),
        num_sequences=len(rows),
        temperature=temperature,
        version=version,
    )


def _minibatches(rows: Sequence[Row], num_minibatches: int, seed: str, whole_groups: bool) -> list[list[Row]]:
    """Deal the rows out, or whole groups of them where the loss compares rows of one group."""
    units: dict[int, list[Row]] = {}
    for number, row in enumerate(rows):
        units.setdefault(row.group if whole_groups else number, []).append(row)
    order = list(units.values())
    if num_minibatches > 1:
        random.Random(seed).shuffle(order)
    return [[row for unit in order[k::num_minibatches] for row in unit] for k in range(num_minibatches)]


def _useful(batch: Batch, needs: Needs) -> Batch:
    """Leave out rows that cannot give a gradient; the batch's totals still count them."""
    if not needs.advantage:
        return batch
    return replace(batch, rows=tuple(row for row in batch.rows if has_advantage(row) and row.num_loss_tokens))


def _offloading(backend: Backend) -> Offloads:
    if not isinstance(backend, Offloads):
        said = f"{type(backend).__name__} declares {OFFLOAD!r} and has no methods offload and onload"
        raise PluginError(f"the backend {said}")
    return backend


def _needs_of(algorithm: object, name: str) -> Needs:
    needs = getattr(algorithm, "needs", None)
    if not isinstance(needs, Needs):
        raise PluginError(
            f"algorithm {name!r} does not say what it needs; give its class an attribute `needs`, an "
            "areal.contracts.algorithm.Needs"
        )
    return needs


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each statistic's mean over the mini-batches that have it, or the largest where it ends in ``_max``."""
    values: dict[str, list[float]] = {}
    for statistics in steps:
        for name, value in statistics.items():
            values.setdefault(name, []).append(value)
    return {name: max(found) if name.endswith("_max") else sum(found) / len(found) for name, found in values.items()}


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
