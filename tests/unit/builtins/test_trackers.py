"""The builtin trackers: what is on disk after a run, a kill and a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal.builtins.trackers.jsonl import JsonlTracker
from areal.builtins.trackers.tensorboard import TensorBoardTracker
from areal.contracts.specs import TrackerContext
from areal.contracts.tracker import Tracker


@pytest.fixture
def context(tmp_path: Path) -> TrackerContext:
    return TrackerContext(run_name="first", run_dir=str(tmp_path / "run"), config={"training": {"max_steps": 3}})


def records(context: TrackerContext) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(context.run_dir) / "metrics.jsonl").read_text().splitlines()]


def steps(context: TrackerContext) -> list[tuple[int, float]]:
    return [(record["step"], record["reward/mean"]) for record in records(context)]


def test_jsonl_writes_each_step_at_once(context: TrackerContext) -> None:
    tracker = JsonlTracker(None, context)
    assert isinstance(tracker, Tracker)
    tracker.log(1, {"reward/mean": 0.25, "loss": math.nan, "ratio": math.inf})
    (record,) = records(context)
    assert abs(record.pop("time") - time.time()) < 60
    assert record == {"step": 1, "reward/mean": 0.25, "loss": None, "ratio": None}
    tracker.log(2, {"reward/mean": 0.5})
    assert steps(context) == [(1, 0.25), (2, 0.5)]
    tracker.close()
    tracker.close()


def test_a_resumed_run_has_no_step_twice(context: TrackerContext) -> None:
    first = JsonlTracker(None, context)
    for step in range(1, 6):
        first.log(step, {"reward/mean": step / 10})
    first.close()
    with (Path(context.run_dir) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # killed while it wrote
    resumed = JsonlTracker(None, context)
    for step in (4, 5):
        resumed.log(step, {"reward/mean": -step / 10})
    resumed.close()
    assert steps(context) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, -0.4), (5, -0.5)]
    assert [path.name for path in Path(context.run_dir).iterdir()] == ["metrics.jsonl"]


def test_jsonl_survives_a_kill(context: TrackerContext) -> None:
    code = (
        "import os, signal; from areal.builtins.trackers.jsonl import JsonlTracker;"
        "from areal.contracts.specs import TrackerContext;"
        f"tracker = JsonlTracker(None, TrackerContext(run_name='r', run_dir={context.run_dir!r}, config={{}}));"
        "[tracker.log(step, {'reward/mean': float(step)}) for step in (1, 2)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == -9
    assert steps(context) == [(1, 1.0), (2, 2.0)]


def test_tensorboard_shows_a_resumed_run_once(context: TrackerContext) -> None:
    first = TensorBoardTracker(None, context)
    assert isinstance(first, Tracker)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 4, "time/train_s": 1.0})
    first.close()
    first.close()
    resumed = TensorBoardTracker(None, context)
    resumed.log(2, {"reward/mean": 0.125})
    resumed.close()
    shown = EventAccumulator(str(Path(context.run_dir) / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("reward/mean")] == [(1, 0.25), (2, 0.125)]
    assert [event.step for event in shown.Scalars("time/train_s")] == [1]


def test_a_tracker_that_logged_nothing_closes(context: TrackerContext) -> None:
    JsonlTracker(None, context).close()
    TensorBoardTracker(None, context).close()
    assert not Path(context.run_dir).exists()


def test_wandb_resumes_the_same_run(context: TrackerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from areal.builtins.trackers.wandb import WandbOptions, WandbTracker

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids: list[str] = []
    for step in (1, 2):
        tracker = WandbTracker(WandbOptions.model_validate({"project": "mine", "tags": ["a"]}), context)
        assert isinstance(tracker, Tracker)
        tracker.log(step, {"reward/mean": 0.5})
        run = tracker._run
        ids.append(run.id)
        assert (run.project, run.name, run.tags, run.config["training"]) == ("mine", "first", ("a",), {"max_steps": 3})
        assert run.offline
        tracker.close()
        tracker.close()
    assert ids[0] == ids[1]
    assert list(Path(context.run_dir).glob("wandb/offline-run-*/*.wandb"))
