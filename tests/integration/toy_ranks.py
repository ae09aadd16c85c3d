"""A backend of several ranks for tests of the trainer's group: each rank trains the builtin backend on all rows.

Gradients are summed over the ranks and divided by their number: of equal ones that changes no bit where the number is
a power of two, so that two ranks give what one gives, and still each of them waits for the other in every step. Each
rank sends its share of the rows of every tensor, and what a rank writes into a checkpoint appears after `save`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from areal import Component, hookimpl
from areal.builtins.torch_backend.backend import TorchBackend
from areal.contracts.algorithm import Loss
from areal.contracts.backend import DistributedOptions
from areal.contracts.messages import Batch
from areal.contracts.resharder import Sender
from areal.contracts.specs import BackendContext, TrainerDevices
from areal.contracts.transfer import Layout, Piece, Plan, Receipt, Transfer, pieces_of
from areal.errors import ConfigError

COLLECTIVE_TIMEOUT_S = 200.0
"""Longer than any test waits: what ends a wait there is never gloo."""


class ToyOptions(DistributedOptions):
    """Invariant: by default nothing is broken."""

    broken_rank: int = -1
    """Raises ConfigError when it starts."""
    write_s: float = 0.0
    """How long writing a checkpoint takes, after `save`."""


class ToyBackend:
    """Invariant: every rank holds the same weights before and after each call."""

    def __init__(self, options: ToyOptions, context: BackendContext) -> None:
        self._options, self._context = options, context
        alone = replace(context, rank=0, devices=TrainerDevices(), rendezvous="")
        self._inner = TorchBackend(None, alone)
        self._sender: tuple[Plan, Sender] | None = None
        self._writing: threading.Thread | None = None

    def start(self) -> None:
        if self._context.rank == self._options.broken_rank:
            raise ConfigError(f"rank {self._context.rank} is broken")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._context.rendezvous}",
            rank=self._context.rank,
            world_size=self._context.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        self._inner.start()
        optimizer = self._inner._optimizer
        step = optimizer.step

        def reduced(learning_rate: float) -> tuple[float, bool]:
            for parameter in optimizer._parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self._context.world_size
            return step(learning_rate)

        optimizer.step = reduced

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._inner.logprobs(batch)

    def train_step(self, batch: Batch, loss: Loss, learning_rate: float | None = None) -> Mapping[str, float]:
        dist.barrier()
        return self._inner.train_step(batch, loss, learning_rate)

    def layout(self) -> Layout:
        whole = self._inner.layout()
        size = self._context.world_size
        pieces = [
            [
                Piece(tensor=index, start=(first, *(0,) * (len(spec.shape) - 1)), shape=(end - first, *spec.shape[1:]))
                for index, spec in enumerate(whole.tensors)
                for first, end in [(spec.shape[0] * rank // size, spec.shape[0] * (rank + 1) // size)]
                if end > first
            ]
            for rank in range(size)
        ]
        return replace(whole, num_ranks=size, pieces=tuple(map(tuple, pieces)))

    def send(self, transfer: Transfer) -> Receipt:
        plan, rank = transfer.plan, self._context.rank
        if not plan.source.pieces:
            return self._inner.send(transfer) if rank == 0 else Receipt(version=transfer.version, checksums={})
        if self._sender is None or self._sender[0].uid != plan.uid:
            self.close_sender()
            self._sender = plan, transfer.resharder.load()(transfer.options, "").sender(plan, rank)
        return self._sender[1].send(transfer.version, self._shares(plan.source), transfer.deadline_s)

    def _shares(self, source: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self._inner._started().module.named_parameters())
        for piece in pieces_of(source, self._context.rank):
            name = source.tensors[piece.tensor].name
            yield name, weights[name].detach()[piece.box]

    def save(self, path: str) -> None:
        """Take a snapshot; a thread writes it."""
        aside = Path(tempfile.mkdtemp(prefix="toy-"))
        if self._context.rank == 0:
            self._inner.save(str(aside))
        (aside / f"rank-{self._context.rank}").write_text("mine")
        self._writing = threading.Thread(target=self._write, args=(aside, path))
        self._writing.start()

    def _write(self, aside: Path, path: str) -> None:
        time.sleep(self._options.write_s)
        shutil.copytree(aside, path, dirs_exist_ok=True)
        shutil.rmtree(aside)

    def finish_save(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def load(self, path: str) -> None:
        assert (Path(path) / f"rank-{self._context.rank}").read_text() == "mine"
        self._inner.load(path)
        dist.barrier()

    def close_sender(self) -> None:
        if self._sender is not None:
            self._sender[1].close()

    def close(self) -> None:
        self.close_sender()
        self._inner.close()
        if dist.is_initialized():
            dist.destroy_process_group()


COMPONENT = Component(
    name="toy",
    factory=f"{__name__}:ToyBackend",
    options=f"{__name__}:ToyOptions",
    capabilities=frozenset({"distributed"}),
)


@hookimpl
def areal_backends() -> list[Component]:
    return [COMPONENT]


def as_plugin(folder: Path) -> None:
    """Write what makes this module a plugin of every process that has the folder on its path."""
    info = folder / "areal_toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[areal]\ntoy = {__name__}\n")
