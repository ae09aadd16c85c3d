"""Trainer and engine as processes on one device, in turn, and both of them killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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


def test_a_run_on_a_shared_device_outlives_its_engine_and_its_trainer(tmp_path: Path, processes: Processes) -> None:
    process = start(
        tmp_path, "run", *SMALL, "resources.shared=true", "training.max_steps=14", "checkpoint.every_steps=4"
    )
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    run = run_folder(tmp_path)
    os.kill(worker_pid(run, "engine-0"), signal.SIGKILL)
    wait_for_step(tmp_path, 6, process)
    os.kill(worker_pid(run, "trainer-0"), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    for name in ("engine-0", "trainer-0"):
        assert f"{name} was lost and is replaced: " in output, output
    assert sorted(path.stem for path in (run / "logs").glob("*.log")) == [
        "engine-0",
        "engine-1",
        "rollout-0",
        "trainer-0",
        "trainer-1",
    ]
    assert sorted(set(steps_of(run))) == list(range(1, 15))
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * 14


def test_an_engine_that_cannot_share_is_refused_before_anything_starts(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "resources.shared=true", "engine.name=sim")
    output = finish(process)
    assert process.returncode == 2 and "'resources.shared' asks the engine to give its memory away" in output, output
    assert not (tmp_path / "runs").exists()
