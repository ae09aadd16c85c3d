"""The backend kit for a backend of several ranks: real processes that look like one backend.

class TestMineOnTwoRanks(OnRanks, BackendConformance):
    num_ranks = 2

    @pytest.fixture
    def component(self) -> Component: ...
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from areal.contracts.algorithm import Loss
from areal.contracts.backend import Backend
from areal.contracts.component import Component
from areal.contracts.messages import Batch
from areal.contracts.specs import BackendContext, TrainerDevices
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.flow.trainer.group import merged
from areal.testing.ranks import Ranks, free_rendezvous

CALL_S = 240.0
_SHARED: dict[int, RankedBackends] = {}


class RankHost:
    """The inside of one rank's process. Invariant: a backend's number names the same backend on every rank."""

    def __init__(self, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._rank = rank
        self._held: dict[int, Backend] = {}

    def make(self, number: int, component: Component, options: Mapping[str, Any], context: BackendContext) -> None:
        """Make a backend, not started yet."""
        own = replace(context, rank=self._rank)
        self._held[number] = component.load()(component.parse_options(options), own)

    def do(self, number: int, method: str, *args: Any) -> Any:
        return getattr(self._held[number], method)(*args)

    def has(self, number: int, method: str) -> bool:
        return hasattr(self._held[number], method)

    def step(self, number: int, batch: Batch, loss: Any, rate: float | None) -> tuple[Mapping[str, float], bytes]:
        """Make a training step; return its statistics and what a watching loss saw in it."""
        old = len(getattr(loss, "seen", ()))
        statistics = self._held[number].train_step(batch, loss, rate)
        return statistics, pickle.dumps(getattr(loss, "seen", [])[old:])

    def drop(self) -> None:
        """Close and forget all backends."""
        for backend in self._held.values():
            if hasattr(backend, "close"):
                backend.close()  # type: ignore[attr-defined]
        self._held.clear()
        gc.collect()  # process groups hang on cycles of modules and hooks, and each has threads that poll


class RankedBackends:
    """Makes backends that run on several ranks. Invariant: all of them share the same processes."""

    def __init__(self, num_ranks: int, devices: TrainerDevices | None = None) -> None:
        """`devices`: what a recipe says, for its ways of parallelism."""
        self._devices = devices or TrainerDevices(world_size=num_ranks, per_node=num_ranks)
        self._num_ranks = num_ranks
        self._ranks: Ranks | None = None
        self._num_made = 0
        self._rendezvous = ""

    def make(self, component: Component, options: Mapping[str, Any], context: BackendContext) -> PlainRankedBackend:
        """Return a backend on all ranks, not started yet."""
        self._rendezvous = self._rendezvous or free_rendezvous()
        self._num_made += 1
        told = replace(context, devices=self._devices, rendezvous=self._rendezvous)
        self.call("make", self._num_made, component, options, told)
        kind: type[PlainRankedBackend] = RankedBackend
        if all(self.call("has", self._num_made, "offload")):
            kind = OffloadingRankedBackend
        elif all(self.call("has", self._num_made, "begin_send")):
            kind = SendingRankedBackend
        elif not all(self.call("has", self._num_made, "freeze_reference")):
            kind = PlainRankedBackend
        return kind(self, self._num_made)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's `RankHost`; processes that do not answer are replaced before the next call."""
        if self._ranks is None:
            self._ranks = Ranks(self._num_ranks, "areal.testing.backend_ranks:RankHost", lambda rank: (rank,))
        try:
            return self._ranks.call(method, *args, deadline_s=CALL_S)
        finally:
            if not self._ranks.is_in_step:
                self.close()

    def drop(self) -> None:
        """Close all backends; the processes stay for the next ones."""
        if self._ranks is not None:
            self.call("drop")
        self._rendezvous = ""

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None
        self._rendezvous = ""


class PlainRankedBackend:
    """A backend on several ranks. Invariant: a call that ranks answer differently raises AssertionError."""

    def __init__(self, ranks: RankedBackends, number: int) -> None:
        self._ranks = ranks
        self._number = number

    def start(self) -> None:
        self._one("start")

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._one("logprobs", batch)

    def values(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._one("values", batch)

    def train_step(self, batch: Batch, loss: Loss, learning_rate: float | None = None) -> Mapping[str, float]:
        """As the contract says; a loss with a list `seen` gets there what all ranks' losses saw, each once."""
        answers = self._ranks.call("step", self._number, batch, loss, learning_rate)
        if hasattr(loss, "seen"):
            parts: list[Any] = []
            for part in (part for _, seen in answers for part in pickle.loads(seen)):
                if not any(_is_same(part, other) for other in parts):
                    parts.append(part)
            loss.seen += parts  # type: ignore[attr-defined]
        return _same([statistics for statistics, _ in answers])

    def layout(self) -> Layout:
        return self._one("layout")

    def send(self, transfer: Transfer) -> Receipt:
        """Send from all ranks; the receipt has all their checksums."""
        return self._joined("send", transfer)

    def _joined(self, method: str, *args: Any) -> Receipt:
        return merged(self._ranks.call("do", self._number, method, *args))

    def save(self, path: str) -> None:
        self._one("save", path)
        if all(self._ranks.call("has", self._number, "finish_save")):
            self._one("finish_save")

    def load(self, path: str) -> None:
        self._one("load", path)

    def close(self) -> None:
        self._one("close")

    def _one(self, method: str, *args: Any) -> Any:
        return _same(self._ranks.call("do", self._number, method, *args))


class RankedBackend(PlainRankedBackend):
    """With a reference. Invariant: as above."""

    def freeze_reference(self) -> None:
        self._one("freeze_reference")

    def reference_logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._one("reference_logprobs", batch)


class SendingRankedBackend(RankedBackend):
    """That goes on while it sends. Invariant: as above."""

    def begin_send(self, transfer: Transfer) -> None:
        self._one("begin_send", transfer)

    def finish_send(self) -> Receipt:
        return self._joined("finish_send")


class OffloadingRankedBackend(RankedBackend):
    """That can do without its devices. Invariant: as above."""

    def offload(self) -> None:
        self._one("offload")

    def onload(self) -> None:
        self._one("onload")


class OnRanks:
    """Put it before `BackendConformance` among a test class's bases. Invariant: every backend runs on `num_ranks`."""

    num_ranks = 2

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, request: pytest.FixtureRequest) -> RankedBackends:
        """The processes that all classes of a module with as many ranks share: no backend outlives its case."""
        if cls.num_ranks not in _SHARED:
            _SHARED[cls.num_ranks] = RankedBackends(cls.num_ranks)
            module = request.node.getparent(pytest.Module)
            module.addfinalizer(lambda: _SHARED.pop(cls.num_ranks).close())
        return _SHARED[cls.num_ranks]

    @pytest.fixture
    def backend_factory(
        self, component: Component, options: dict[str, Any], ranks: RankedBackends
    ) -> Iterator[Callable[[BackendContext], Backend]]:
        yield lambda context: ranks.make(component, options, context)
        ranks.drop()


def _same(answers: list[Any]) -> Any:
    """Return what all ranks answered; NaN equals NaN."""
    for rank, answer in enumerate(answers):
        assert repr(answer) == repr(answers[0]), f"rank {rank} answered {answer!r:.500}, rank 0 {answers[0]!r:.500}"
    return answers[0]


def _is_same(part: Any, other: Any) -> bool:
    """Whether two ranks' losses saw the same micro-batch."""
    (logprobs, batch), (others, other_batch) = part, other
    return (
        logprobs.tolist() == others.tolist()
        and batch.advantages.tolist() == other_batch.advantages.tolist()
        and batch.behavior_logprobs.tolist() == other_batch.behavior_logprobs.tolist()
    )
