"""What a run bears while it goes on: frozen engines, dead trainers and rollout workers, workers that come and leave."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
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

LONG = ("training.max_steps=4000", "checkpoint.every_steps=5", "sampling.max_new_tokens=96")


def workers(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run `areal workers ...` and return (exit code, what it said)."""
    command = [sys.executable, "-m", "areal.cli.main", "workers", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.returncode, done.stdout + done.stderr


def names(folder: Path) -> dict[str, str]:
    """Return the state of every worker by name, as `areal workers list` says it."""
    code, said = workers(folder, "list", "latest")
    assert code == 0, said
    return {row.split()[0]: row.split()[2] for row in said.splitlines()[1:]}


def wait_for(folder: Path, wanted: dict[str, str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (there := names(folder)) != wanted:
        assert time.monotonic() < deadline, f"{there} did not become {wanted}"
        time.sleep(0.3)


def end(folder: Path, process: subprocess.Popen[str]) -> str:
    """Let the run finish its step and end; return what it said."""
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def test_frozen_and_dead_workers_are_replaced_while_the_run_goes_on(tmp_path: Path, processes: Processes) -> None:
    process = start(
        tmp_path, "run", *SMALL, *LONG, "engine.replicas=2", "rollout.workers=2", "failures.hang_timeout_s=4"
    )
    processes.append(process)
    wait_for_step(tmp_path, 6, process)
    run = run_folder(tmp_path)
    os.kill(worker_pid(run, "engine-0"), signal.SIGSTOP)
    wait_for(tmp_path, _states("engine-1", "engine-2", "rollout-0", "rollout-1", "trainer-0"))
    os.kill(worker_pid(run, "trainer-0"), signal.SIGKILL)
    os.kill(worker_pid(run, "rollout-0"), signal.SIGKILL)
    wait_for(tmp_path, _states("engine-1", "engine-2", "rollout-1", "rollout-2", "trainer-1"))
    os.kill(worker_pid(run, "rollout-1"), signal.SIGSTOP)
    wait_for(tmp_path, _states("engine-1", "engine-2", "rollout-2", "rollout-3", "trainer-1"))
    wait_for_step(tmp_path, steps_of(run)[-1] + 5, process)
    output = end(tmp_path, process)
    for name in ("engine-0", "trainer-0", "rollout-0", "rollout-1"):
        assert f"{name} was lost and is replaced: " in output, output
    assert "the trainer goes on from the checkpoint of step " in output
    done = steps_of(run)
    assert done == list(range(1, len(done) + 1)), "each step stands once, also those made twice"
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * len(done)
    with sqlite3.connect(run / "journal.sqlite") as journal:
        lost = [worker for (worker,) in journal.execute("SELECT worker FROM failures ORDER BY id")]
    assert sorted(lost) == ["engine-0", "rollout-0", "rollout-1", "trainer-0"]


def _states(*wanted: str) -> dict[str, str]:
    return {name: "serving" if name.startswith("engine") else "working" for name in wanted}


def test_workers_come_and_leave_while_the_run_goes_on(tmp_path: Path, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, *LONG, "engine.max=2")
    processes.append(process)
    wait_for_step(tmp_path, 2, process)
    run = run_folder(tmp_path)
    assert workers(tmp_path, "add", run.name, "engine") == (0, "engine-1 has started\n")
    code, said = workers(tmp_path, "add", "latest", "rollout", "--count", "2")
    assert (code, sorted(said.splitlines())) == (
        0,
        ["rollout-1 has started", "rollout-2 has started"],
    )
    wait_for(tmp_path, _states("engine-0", "engine-1", "rollout-0", "rollout-1", "rollout-2", "trainer-0"))
    code, said = workers(tmp_path, "add", "latest", "engine")
    assert code == 2 and said == "error: one more engine was asked for and the recipe allows 2; raise engine.max\n"
    assert workers(tmp_path, "remove", "latest", "engine-0", "rollout-0", "rollout-1") == (
        0,
        "engine-0 has left\nrollout-0 has left\nrollout-1 has left\n",
    )
    assert names(tmp_path) == _states("engine-1", "rollout-2", "trainer-0")
    code, said = workers(tmp_path, "remove", "latest", "engine-1")
    assert code == 2 and "at least 1 of its kind; lower engine.min" in said
    wait_for_step(tmp_path, steps_of(run)[-1] + 5, process)
    output = end(tmp_path, process)
    assert "was lost" not in output
    done = steps_of(run)
    trained, issued = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * len(done) <= issued
    code, said = workers(tmp_path, "list", "latest")
    assert code == 2 and f"run {run.name} is not going on on this machine" in said


def test_a_stall_is_explained_and_ended(tmp_path: Path, processes: Processes) -> None:
    """One worker is frozen, and looked for signs of life only much later than for samples."""
    patience = ("failures.quiet_time_s=6", "rollout.episode_timeout_s=6", "failures.hang_timeout_s=600")
    process = start(tmp_path, "run", *SMALL, *LONG, *patience)
    processes.append(process)
    wait_for_step(tmp_path, 2, process)
    run = run_folder(tmp_path)
    os.kill(worker_pid(run, "rollout-0"), signal.SIGSTOP)
    wait_for(tmp_path, _states("engine-0", "rollout-1", "trainer-0"))
    wait_for_step(tmp_path, steps_of(run)[-1] + 3, process)
    output = end(tmp_path, process)
    assert "stalled: the trainer waited 6 s for 4 groups of step " in output
    assert "rollout-0 gave no sign of life for 10 s" in output
    (stacks,) = (run / "logs").glob("stall-*.txt")
    assert "==== rollout-0" in stacks.read_text() and "stopped" in stacks.read_text()


def newcomer_pid(folder: Path, name: str) -> int:
    """Return the process of a worker as soon as there is one."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return worker_pid(run_folder(folder), name)
        except (AssertionError, OSError, ValueError):  # no folder, no process yet
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_workers_that_are_killed_before_the_first_step_are_started_again(tmp_path: Path, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, "training.max_steps=2", "rollout.workers=1")
    processes.append(process)
    for name in ("trainer-0", "engine-0", "rollout-0"):
        os.kill(newcomer_pid(tmp_path, name), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert re.search("warning: trainer-0 did not start: .*; trying again", output), output
    assert steps_of(run_folder(tmp_path)) == [1, 2]
