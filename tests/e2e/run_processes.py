"""Runs as processes: start one, wait for a step, find its workers, read what it left."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

SMALL = (
    "training.batch_size=4",
    "algorithm.group_size=4",
    "training.warmup.steps=3",
    "evaluation.every_steps=0",
    "trackers=[jsonl]",
)
DEADLINE_S = 180
Processes = list[subprocess.Popen[str]]


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment |= {"COLUMNS": "100", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "areal.cli.main", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return output


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the run ended early with {process.returncode}:\n{process.stdout.read()}")
        metrics = list(folder.glob("runs/*/metrics.jsonl"))
        if metrics and len(metrics[0].read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {DEADLINE_S} s")


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def consumption(run: Path) -> tuple[list[tuple[int, int]], int]:
    """Return (group, step) of everything trained, and the number of groups issued."""
    with sqlite3.connect(run / "journal.sqlite") as journal:
        trained = journal.execute("SELECT group_number, step FROM consumed WHERE fate = 'trained'").fetchall()
        (issued,) = journal.execute("SELECT count(*) FROM groups").fetchone()
    return trained, issued


def worker_pid(run: Path, name: str) -> int:
    """Return the process that writes the worker's log."""
    log = str(run / "logs" / f"{name}.log")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str((entry / "fd" / "1").readlink()) == log:
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no process writes {log}")
