"""Trainers of several ranks for tests of checkpoints, exports and LoRA: one set of processes, many backends."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.algorithms.grpo import Grpo
from areal.contracts.messages import Batch
from areal.contracts.specs import BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal.contracts.transfer import Layout
from areal.errors import WorkerFailed
from areal.testing.backend_fixtures import batch_of, sample_rows
from areal.testing.engine_fixtures import HostCpu
from areal.testing.ranks import Ranks, free_rendezvous
from areal_fsdp2 import export, rollcall
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options
from areal_fsdp2.recording import Collective, collectives

BATCHES = [batch_of(sample_rows(seed)) for seed in range(6)]
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "max_steps": 8,
    "weight_decay": 0.1,
    "micro_batch_tokens": 200,
}


def context_of(
    path: str, num_ranks: int, dtype: Any = "float32", role: Any = "actor", **training: Any
) -> BackendContext:
    return BackendContext(
        model=ModelSpec(path=path, dtype=dtype),
        training=TrainingSpec(**{**TRAINING, **training}),
        accelerator=HostCpu(),
        seed=0,
        role=role,
        devices=TrainerDevices(world_size=num_ranks, per_node=num_ranks),
    )


class Host:
    """One rank. Backends are not closed, so that all of them share one process group."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._rendezvous = rendezvous
        self._held: dict[int, Fsdp2Backend] = {}

    def make(self, number: int, options: Mapping[str, Any], context: BackendContext) -> None:
        context = replace(context, rank=self._rank, rendezvous=self._rendezvous)
        self._held = {number: Fsdp2Backend(Fsdp2Options(**options), context), **self._held}
        self._held[number].start()

    def step(self, number: int, batch: Batch) -> Mapping[str, float]:
        return self._held[number].train_step(batch, Grpo())

    def do(self, number: int, method: str, *args: Any) -> Any:
        return getattr(self._held[number], method)(*args)

    def counts(self, number: int) -> dict[str, Any]:
        """Return what counts updates: the schedule's number, each parameter's, and the loss scale with its own."""
        return counts_of(self._held[number])

    def save_without(self, number: int, path: str, lost: int) -> tuple[str, float]:
        """Begin a save and kill a rank at once; return what the others say of its end, and after how many seconds."""
        self._held[number].save(path)
        rollcall.ANSWER_S = 3.0
        if self._rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            self._held[number].finish_save()
        except WorkerFailed as error:
            return str(error), time.monotonic() - started
        return "", time.monotonic() - started

    def delay(self, number: int, seed: int) -> None:
        """Let the update of each unit begin late, by a random time."""
        rng = random.Random(seed)
        for unit in self._held[number]._optimizer._updates.units:

            def late(*args: Any, update: Any = unit.update) -> None:
                time.sleep(rng.uniform(0.0, 0.03))
                update(*args)

            unit.update = late

    def threads(self, number: int) -> tuple[int, int | None]:
        """Return who makes this rank's calls, and who its updates."""
        thread = self._held[number]._optimizer._updates._thread
        return threading.get_ident(), thread and thread.submit(threading.get_ident).result(10.0)

    def recorded(self, number: int) -> list[Collective]:
        """Return the collectives of this rank, whoever asked for them."""
        return collectives()

    def own_sizes(self, number: int) -> int:
        """Return how many numbers of the weights this rank holds."""
        return sum(part.view.numel() for part in self._held[number]._shards.parts)

    def exported(self, number: int) -> list[tuple[str, tuple[int, ...], Any]]:
        """Return name, place and numbers of each piece that this rank would send."""
        backend = self._held[number]
        layout = backend._shards
        return [
            (name, piece.start, tensor.detach().clone().numpy())
            for piece, (name, tensor) in zip(layout.pieces[self._rank], layout.own(), strict=True)
        ]

    def export(self, number: int, folder: str, max_bytes: int) -> set[str]:
        """Write a Hugging Face folder of small files; return the names of those that this rank wrote."""
        backend, written = self._held[number], set[str]()
        write_file = export._write_file

        def noting(path: Path, *args: Any) -> None:
            written.add(path.name)
            write_file(path, *args)

        (found,) = backend._exports(backend._started())
        if self._rank == 0:
            Path(folder).mkdir()
            found.describe(Path(folder))
        dist.barrier()
        export._write_file = noting
        try:
            assert backend._checkpoints is not None
            export.write(found.weights, Path(folder), found.stem, backend._checkpoints._group, max_bytes)
        finally:
            export._write_file = write_file
        dist.barrier()
        return written


def counts_of(backend: Fsdp2Backend) -> dict[str, Any]:
    backend._optimizer.settle()  # an update counts one parameter after the other
    steps = set(backend._trained.steps().values())
    return {"num_updates": backend._num_updates, "steps": steps, **backend._optimizer.scale.state_dict()}


def held_by(backend: Fsdp2Backend, path: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, as one rank reads it."""
    backend.load(str(path))
    return {f"{kind}/{part.name}": part.view.clone() for kind, parts in backend._kinds().items() for part in parts}


class Trainer:
    """A backend on all ranks of some processes."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks = ranks
        self._number = number

    def each(self, method: str, *args: Any) -> list[Any]:
        """Return what each rank answers to a method of its `Host`."""
        return self._ranks.call(method, self._number, *args)

    def do(self, method: str, *args: Any) -> Any:
        """Return what all ranks answer to a method of the backend."""
        answers = self.each("do", method, *args)
        assert all(repr(answer) == repr(answers[0]) for answer in answers)  # NaN is NaN
        return answers[0]

    @property
    def number(self) -> int:
        return self._number

    def steps(self, batches: list[Batch]) -> list[Mapping[str, float]]:
        found: list[Mapping[str, float]] = []
        for batch in batches:
            answers = self.each("step", batch)
            assert all(answer == answers[0] for answer in answers)
            found.append(answers[0])
        return found

    def save(self, path: Path) -> Path:
        self.do("save", str(path))
        self.do("finish_save")
        return path

    def published(self) -> dict[str, Tensor]:
        """Return the tensors that the ranks' pieces make up."""
        layout: Layout = self.do("layout")
        whole = {spec.name: torch.full(spec.shape, torch.nan) for spec in layout.tensors}
        for name, start, numbers in (piece for pieces in self.each("exported") for piece in pieces):
            box = tuple(slice(low, low + size) for low, size in zip(start, numbers.shape, strict=True))
            assert whole[name][box].isnan().all(), "two ranks send the same"
            whole[name][box] = torch.from_numpy(numbers)
        return whole


class Trainers:
    """Makes backends. Invariant: all of them run in the same processes."""

    def __init__(self, num_ranks: int) -> None:
        rendezvous = free_rendezvous()
        self.num_ranks = num_ranks
        self.ranks = Ranks(num_ranks, "fsdp2_trainers:Host", lambda rank: (rank, rendezvous))
        self._num_made = 0

    def start(self, path: str, options: Mapping[str, Any] | None = None, **numbers: Any) -> Trainer:
        self._num_made += 1
        self.ranks.call("make", self._num_made, options or {}, context_of(path, self.num_ranks, **numbers))
        return Trainer(self.ranks, self._num_made)
