"""A trainer that dies in the middle of a run: the law of resuming, without ending the run."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from areal.app import observer as observer_module
from areal.app import run
from areal.cluster.inline import InlineCluster, InlineHandle
from areal.config import load_recipe
from areal.contracts.cluster import WorkerSpec
from areal.contracts.messages import StepReport
from areal.errors import WorkerFailed
from areal.monitor.summary import Summary
from areal.plugins import discover

SMALL = (
    "training.max_steps=9",
    "training.batch_size=2",
    "training.warmup.steps=2",
    "algorithm.group_size=4",
    "checkpoint={every_steps: 4, keep: 2}",
    "cluster.name=inline",
    "reshard.name=disk",
    "trackers=[jsonl]",
)


class Murder:
    """Ends trainers after given steps. Invariant: each step kills once, however often it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        self.steps = list(steps)
        self.handles: dict[str, InlineHandle] = {}
        self.tasks: list[asyncio.Task[None]] = []
        spawn, step_finished = InlineCluster.spawn, observer_module.RunObserver.step_finished

        async def remember(cluster: InlineCluster, spec: WorkerSpec) -> InlineHandle:
            self.handles[spec.kind] = handle = await spawn(cluster, spec)
            return handle

        def kill(observer: observer_module.RunObserver, report: StepReport) -> None:
            step_finished(observer, report)
            if self.steps and report.step == self.steps[0]:
                self.steps.pop(0)
                self.tasks.append(asyncio.create_task(self.handles["trainer"].end("signal 9")))

        monkeypatch.setattr(InlineCluster, "spawn", remember)
        monkeypatch.setattr(observer_module.RunObserver, "step_finished", kill)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over several threads may come out in another order each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finished(runs_dir: Path, *overrides: str, said: io.StringIO | None = None) -> Summary:
    config = load_recipe(None, (*SMALL, f"runs_dir={runs_dir}", *overrides), {}, resolve=discover().resolve)
    return run(config, console=Console(file=said, width=400) if said else Console(quiet=True))


def weights(summary: Summary) -> dict[str, object]:
    return load_file(summary.checkpoint / "model.safetensors")


SYNCHRONOUS = ("staleness.max=0", "evaluation.every_steps=0")
"""Who shares a batch with whom decides the last bit of a logprob, and evaluations share batches."""
ASYNCHRONOUS = ("staleness.max=2", "evaluation={every_steps: 2, num_prompts: 4}")


@pytest.mark.parametrize("how", [SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    undisturbed = finished(tmp_path / "undisturbed", *how)
    said = io.StringIO()
    with monkeypatch.context() as patch:
        Murder(patch, 3, 6, 8)
        disturbed = finished(tmp_path / "disturbed", *how, said=said)
    assert said.getvalue().count("was lost and is replaced: ") == 3
    assert "trainer-0 was lost" in said.getvalue() and "from the checkpoint of step 4" in said.getvalue()
    logged = [json.loads(line)["step"] for line in (disturbed.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in logged if logged.count(step) > 2] == [] and sorted(set(logged)) == list(range(1, 10))
    with sqlite3.connect(disturbed.folder / "journal.sqlite") as journal:
        trained = journal.execute("SELECT group_number FROM consumed WHERE fate = 'trained'").fetchall()
        assert len(trained) == len(set(trained)) == 18
        lost = journal.execute("SELECT worker, step FROM failures ORDER BY id").fetchall()
    assert [worker for worker, _ in lost] == ["trainer-0", "trainer-1", "trainer-2"]
    # It may be in the middle of the next step when it is killed.
    assert all(step - killed in (0, 1) for (_, step), killed in zip(lost, (3, 6, 8), strict=True))
    if how is SYNCHRONOUS:
        expected, found = weights(undisturbed), weights(disturbed)
        assert all(found[name].equal(tensor) for name, tensor in expected.items())  # type: ignore[attr-defined]


def test_a_trainer_that_keeps_dying_ends_the_run_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Murder(monkeypatch, *([2] * 5))
    with pytest.raises(WorkerFailed, match=r"(?s)3 workers were lost.*trainer-0: .*signal 9.*areal resume"):
        finished(tmp_path, "failures.max_restarts=2", "failures.backoff_s=0.01")
