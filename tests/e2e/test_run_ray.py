"""The command line with real processes: runs, Ctrl-C, kill -9, resume."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

from run_processes import (
    DEADLINE_S,
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


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("areal-*"))
    process = start(tmp_path, "run", *SMALL, "training.max_steps=6", "trackers=[jsonl, tensorboard]")
    output = finish(process)
    assert process.returncode == 0, output
    assert set(Path("/dev/shm").glob("areal-*")) <= before, "shared memory outlives its process"
    run = run_folder(tmp_path)
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    for there in (
        "config.yaml",
        "journal.sqlite",
        "reward.png",
        "tensorboard",
        "logs/engine-0.log",
        "logs/trainer-0.log",
    ):
        assert (run / there).exists(), there
    assert (run / "checkpoints" / "step-00000006" / "model" / "model.safetensors").exists()
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 24
    assert "checkpoint" in output and "reward, last 10 steps" in output


def test_first_ctrl_c_finishes_the_step_and_resume_goes_on(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    process = start(tmp_path, "run", *SMALL, "training.max_steps=4000")
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    second = start(tmp_path, "resume")
    refused = finish(second)
    assert second.returncode == 2 and f"is still going on in process {process.pid}" in refused, refused
    # What a terminal does: every process of the group gets it.
    os.killpg(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    run = run_folder(tmp_path)
    done = steps_of(run)
    assert (run / "checkpoints" / f"step-{done[-1]:08d}" / "model").is_dir()
    edited = (run / "config.yaml").read_text().replace("max_steps: 4000", f"max_steps: {done[-1] + 3}")
    (run / "config.yaml").write_text(edited)
    process = start(tmp_path, "resume")
    output = finish(process)
    assert process.returncode == 0, output
    assert steps_of(run) == list(range(1, done[-1] + 4))
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * (done[-1] + 3)


def test_ctrl_c_before_the_first_step_stops_at_once(tmp_path: Path, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, "training.warmup.steps=100000")
    processes.append(process)
    deadline = time.monotonic() + DEADLINE_S
    while not list(tmp_path.glob("runs/*/logs/trainer-0.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    output = finish(process)
    assert process.returncode == 130 and "stopping before the first step" in output, output
    assert time.monotonic() - began < 60


def test_kill_9_of_the_controller_loses_nothing(tmp_path: Path, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, "training.max_steps=30", "checkpoint.every_steps=4")
    processes.append(process)
    wait_for_step(tmp_path, 6, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run = run_folder(tmp_path)
    with sqlite3.connect(run / "journal.sqlite") as journal:
        before = set(journal.execute("SELECT group_number, sample FROM trajectories"))
        (saved,) = journal.execute("SELECT max(step) FROM checkpoints").fetchone()
    assert saved == 4
    process = start(tmp_path, "resume", run.name)
    processes.append(process)
    output = finish(process)
    assert process.returncode == 0, output
    trained, issued = consumption(run)
    assert steps_of(run) == list(range(1, 31))
    assert len(trained) == len({group for group, _ in trained}) == 30 * 4
    with sqlite3.connect(run / "journal.sqlite") as journal:
        after = set(journal.execute("SELECT group_number, sample FROM trajectories"))
        consumed = {group for (group,) in journal.execute("SELECT group_number FROM consumed")}
    assert before <= after
    # Whole before the kill and not consumed by the checkpoint: the first steps after it trained them.
    groups = [group for group, _ in before]
    assert {group for group in groups if groups.count(group) == 4} <= {group for group, _ in trained}
    # One that was half made is completed by the restored, older weights, and may be too stale in its turn: journalled.
    assert set(groups) <= consumed and len(consumed) == issued


def test_a_killed_engine_is_replaced_and_the_run_goes_on(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    # Comparing engine and trainer in every step, so that the kill often falls into a comparison.
    process = start(tmp_path, "run", *SMALL, "training.max_steps=25", "parity.every_steps=1")
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    os.kill(worker_pid(run_folder(tmp_path), "engine-0"), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    run = run_folder(tmp_path)
    assert (run / "logs" / "engine-1.log").exists()
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 100


WITNESS = """
import os, sys
from areal import hookimpl

@hookimpl
def areal_engine_process(name):
    os.write(1, f"engine {name} is at home in {sys.prefix}\\n".encode())
"""


def test_engines_in_another_environment(tmp_path: Path, processes: Processes, other_python: Path) -> None:
    """They are workers like the others, replaced when they die, and hear of plugins that are installed there only."""
    (packages,) = (other_python.parents[1] / "lib").glob("python*/site-packages")
    (packages / "areal_witness.py").write_text(WITNESS)
    (packages / "areal_witness-1.0.dist-info").mkdir()
    (packages / "areal_witness-1.0.dist-info" / "METADATA").write_text("Name: areal-witness\nVersion: 1.0\n")
    (packages / "areal_witness-1.0.dist-info" / "entry_points.txt").write_text("[areal]\nwitness = areal_witness\n")
    process = start(tmp_path, "run", *SMALL, "training.max_steps=25", f"engine.python={other_python}")
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    run = run_folder(tmp_path)
    os.kill(worker_pid(run, "engine-0"), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    said = f"engine transformers is at home in {other_python.parents[1]}\n"
    logs = {name: (run / "logs" / f"{name}.log").read_text() for name in ("engine-0", "engine-1", "trainer-0")}
    assert [said in log for log in logs.values()] == [True, True, False]
    assert steps_of(run) == list(range(1, 26))
