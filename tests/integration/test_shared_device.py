"""Trainer and engine on one device, in turn: nothing else about a run changes, whoever dies in whose turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from areal.app import run
from areal.builtins.torch_backend.backend import TorchBackend
from areal.builtins.transformers_engine.batcher import Batcher
from areal.cluster.inline import InlineCluster, InlineHandle
from areal.config import load_recipe
from areal.contracts.cluster import WorkerSpec
from areal.monitor.summary import Summary
from areal.plugins import discover

SMALL = (
    "training.max_steps=6",
    "training.batch_size=2",
    "training.warmup.steps=2",
    "algorithm.group_size=4",
    "checkpoint={every_steps: 2, keep: 2}",
    "cluster.name=inline",
    "reshard.name=disk",
    "trackers=[jsonl]",
)
SYNCHRONOUS = ("staleness.max=0", "evaluation.every_steps=0")
ASYNCHRONOUS = ("staleness.max=2", "evaluation={every_steps: 2, num_prompts: 4}")
SHARED = "resources.shared=true"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over several threads may come out in another order each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finished(runs_dir: Path, *overrides: str) -> Summary:
    config = load_recipe(None, (*SMALL, f"runs_dir={runs_dir}", *overrides), {}, resolve=discover().resolve)
    return run(config, console=Console(quiet=True))


def check_equal(first: Summary, second: Summary) -> None:
    expected, found = (load_file(summary.checkpoint / "model.safetensors") for summary in (first, second))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        # What an engine happens to compute together decides the last bit of its logprobs.
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-6, msg=name)


class Turns:
    """Looks at whose memory is on the device. Invariant: each update and each engine step is seen before it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: list[tuple[str, InlineHandle]] = []
        self.num_updates = self.num_steps = self.most_waiting = 0
        self.before_update: Callable[[int], None] = lambda number: None
        self.before_step: Callable[[int], None] = lambda number: None
        spawn, update, step = InlineCluster.spawn, TorchBackend.train_step, Batcher.step

        async def remember(cluster: InlineCluster, spec: WorkerSpec) -> InlineHandle:
            handle = await spawn(cluster, spec)
            self.handles.append((spec.kind, handle))
            return handle

        def watched_update(backend: TorchBackend, *args: Any) -> Any:
            engines = [handle._worker._engine for handle in self.living("engine")]
            assert all(engine._is_away and engine._paused for engine in engines)
            self.most_waiting = max([self.most_waiting, *(engine.load()["running"] for engine in engines)])
            self.num_updates += 1
            self.before_update(self.num_updates)
            return update(backend, *args)

        def watched_step(batcher: Batcher) -> None:
            assert all(handle._worker._backend._is_away for handle in self.living("trainer"))
            self.num_steps += 1
            self.before_step(self.num_steps)
            step(batcher)

        monkeypatch.setattr(InlineCluster, "spawn", remember)
        monkeypatch.setattr(TorchBackend, "train_step", watched_update)
        monkeypatch.setattr(Batcher, "step", watched_step)

    def living(self, kind: str) -> list[InlineHandle]:
        return [handle for its_kind, handle in self.handles if its_kind == kind and handle._worker is not None]

    def kill(self, kind: str) -> None:
        """As soon as what runs now waits for something."""
        (handle,) = self.living(kind)
        self.killing = asyncio.get_running_loop().create_task(handle.end("signal 9"))


def test_the_weights_are_those_of_a_run_with_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parity = "parity.every_steps=2"
    apart = finished(tmp_path / "apart", *SYNCHRONOUS, parity)
    turns = Turns(monkeypatch)
    shared = finished(tmp_path / "shared", *SYNCHRONOUS, parity, SHARED)
    check_equal(apart, shared)
    assert [metrics["staleness/max"] for _, metrics in shared.steps] == [0.0] * 6
    assert turns.num_updates >= 6 and turns.num_steps > 6


def test_requests_wait_through_the_trainers_turn_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch)
    # One step's samples at a time: when they are there, the next step's are being made.
    summary = finished(tmp_path, *ASYNCHRONOUS, SHARED, "parity.every_steps=3", "engine.max_batch=8")
    assert [step for step, _ in summary.steps] == [1, 2, 3, 4, 5, 6]
    assert turns.most_waiting > 0, "no request was running when the trainer took the device"
    assert max(metrics["staleness/max"] for _, metrics in summary.steps) > 0
    assert all(metrics["workers/lost"] == 0 for _, metrics in summary.steps)
    assert len(summary.evaluations) == 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Summary]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield finished(tmp_path_factory.mktemp("undisturbed"), *SYNCHRONOUS, SHARED)
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["engine", "trainer"])
@pytest.mark.parametrize("turn", ["engine", "trainer"])
@pytest.mark.parametrize("how", [SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_a_death_in_either_turn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Summary,
    kind: str,
    turn: str,
    how: tuple[str, ...],
) -> None:
    turns = Turns(monkeypatch)
    waiting = ["alive"]

    def kill(_: int) -> None:
        if waiting and turns.num_updates == 6:  # that of step 4: two warmed up
            waiting.clear()
            turns.kill(kind)

    setattr(turns, "before_update" if turn == "trainer" else "before_step", kill)
    disturbed = finished(tmp_path, *how, SHARED, "failures.backoff_s=0.01")
    assert not waiting
    assert [step for step, _ in disturbed.steps] == [1, 2, 3, 4, 5, 6]
    assert disturbed.steps[-1][1]["workers/lost"] == 1
    assert [its_kind for its_kind, _ in turns.handles].count(kind) == 2
    # An engine that dies at work has its requests made anew, in other company: the last bit of a logprob may differ.
    if how is SYNCHRONOUS and (kind, turn) != ("engine", "engine"):
        check_equal(undisturbed, disturbed)
