"""Our side: `areal run` as a user starts it; its curve comes from the run's folder."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from measuring.curve import Curve, spread
from measuring.processes import ROOT, areal_command, run_process

LARGE = ("checkpoints", "weights")
"""Folders of a run that nobody needs after it was measured; a checkpoint of SmolLM2 has 1.9 GB."""


def run_areal(
    label: str,
    recipe: Mapping[str, Any] | None,
    arguments: Sequence[str],
    *,
    folder: Path,
    cores: int,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    keep: bool = False,
) -> tuple[Curve, Path]:
    """Run a recipe, or with None the bundled one; return its curve and the run's folder.

    `python`: the interpreter whose environment the run is made in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [*areal_command(python), "run"]
    if recipe is not None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe), sort_keys=False), encoding="utf-8")
        command.append(str(folder / "recipe.yaml"))
    command += [*arguments, f"runs_dir={folder / 'runs'}"]
    paths = {"PYTHONPATH": str(ROOT / "benchmarks"), "HF_HUB_OFFLINE": "1"}
    started, ended = run_process(
        command, log=folder / "log", cores=cores, environment={**paths, **(environment or {})}, deadline_s=deadline_s
    )
    run = newest_run(folder)
    curve = read_curve(label, run, started, ended)
    if not keep:
        for name in LARGE:
            shutil.rmtree(run / name, ignore_errors=True)
    return curve, run


def newest_run(folder: Path) -> Path:
    """Return the folder of the last run that `run_areal` started in `folder`, whether or not it came to its end."""
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """Return what the run's ``metrics.jsonl`` says, steps and evaluations; a number that was not finite is None."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def step_lines(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step, in order."""
    return [line for line in metric_lines(run) if "reward/mean" in line]


def read_curve(label: str, run: Path, started: float, ended: float) -> Curve:
    """Read a run's folder: times and lengths from the journal, rewards from ``metrics.jsonl``."""
    steps = step_lines(run)
    times = dict(_ask(run, "SELECT step, finished_at FROM steps"))
    ((began,),) = _ask(run, "SELECT min(issued_at) FROM groups")
    lengths = [float(number) for (number,) in _ask(run, "SELECT num_tokens FROM trajectories")]
    step_s = sum(step["time/step_s"] for step in steps)
    return Curve(
        label=label,
        started=started,
        began=began,
        ended=ended,
        times=[times[step["step"]] for step in steps],
        rewards=[step["reward/mean"] for step in steps],
        lengths=lengths,
        extra={
            "train_share": sum(step["time/train_s"] for step in steps) / step_s,
            "wait_share": sum(step["time/wait_s"] for step in steps) / step_s,
            "staleness_mean": sum(step["staleness/mean"] for step in steps) / len(steps),
            "groups_dropped": steps[-1]["staleness/dropped_groups"],
            **spread(lengths),
        },
    )


def issued_prompts(run: Path) -> list[dict[str, Any]]:
    """Return the run's prompts in the order in which it issued them, with the token ids the model was given."""
    query = """SELECT prompt, body FROM groups JOIN trajectories ON group_number = number
               WHERE sample = 0 ORDER BY number"""
    return [
        {**json.loads(prompt), "prompt_ids": json.loads(body)["turns"][0]["prompt_ids"]}
        for prompt, body in _ask(run, query)
    ]


def _ask(run: Path, query: str) -> list[Any]:
    database = sqlite3.connect(run / "journal.sqlite")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()
