"""Trainer and engine as processes on one device, in turn, each of them killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from run_processes import (
    SMALL,
    Processes,
    consumption,
    finish,
    run_folder,
    start,
    steps_of,
    wait_for_step,
    worker_pid,
)


@pytest.mark.parametrize("kind", ["engine", "trainer"])
def test_a_run_on_a_shared_device_outlives(tmp_path: Path, processes: Processes, kind: str) -> None:
    overrides = ("resources.shared=true", "training.max_steps=12", "checkpoint.every_steps=4")
    process = start(tmp_path, "run", *SMALL, *overrides)
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    run = run_folder(tmp_path)
    os.kill(worker_pid(run, f"{kind}-0"), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert f"{kind}-0 was lost and is replaced: " in output, output
    logs = {path.stem for path in (run / "logs").glob("*.log")}
    assert logs == {"engine-0", "rollout-0", "trainer-0", f"{kind}-1"}
    assert sorted(set(steps_of(run))) == list(range(1, 13))
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * 12


def test_an_engine_that_cannot_share_is_refused_before_anything_starts(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "resources.shared=true", "engine.name=sim")
    output = finish(process)
    assert process.returncode == 2 and "'resources.shared' asks the engine to give its memory away" in output, output
    assert not (tmp_path / "runs").exists()
