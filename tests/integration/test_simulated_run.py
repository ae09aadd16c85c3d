"""Whole runs on the simulated cluster: the real controller, journal and staleness law, in no time."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from areal.app import resume, run
from areal.config import load_recipe
from areal.errors import WorkerFailed
from areal.monitor.summary import Summary
from areal.plugins import discover

RECIPE = Path(__file__).parents[2] / "recipes" / "simulated_cluster.yaml"
SMALL = ("engine.replicas=12", "training.batch_size=24", "training.max_steps=8", "checkpoint.every_steps=4")
REAL_TIME = ("time", "time/train_s")
"""Figures of the trainer's and the tracker's own clock, which is the real one."""


def simulate(runs_dir: Path, *overrides: str) -> Summary:
    config = load_recipe(str(RECIPE), (*SMALL, *overrides, f"runs_dir={runs_dir}"), resolve=discover().resolve)
    return run(config, console=Console(quiet=True))


def journalled(summary: Summary) -> list[tuple[object, ...]]:
    """Return every trajectory and what became of its group, without real times."""
    database = sqlite3.connect(summary.folder / "journal.sqlite")
    query = """SELECT group_number, sample, reward, min_version, num_tokens, step, fate FROM trajectories
               LEFT JOIN consumed USING (group_number) ORDER BY 1, 2"""
    rows = database.execute(query).fetchall()
    database.close()
    return rows


def test_a_run_says_how_busy_its_engines_were_and_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    first, second = simulate(tmp_path / "a"), simulate(tmp_path / "b")
    lines = [json.loads(line) for line in (first.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(0.0 < line["engine/busy_share"] <= 1.0 for line in lines[1:])
    assert max(line["staleness/max"] for line in lines) <= 2
    assert journalled(first) == journalled(second)
    assert journalled(first) != journalled(simulate(tmp_path / "c", "seed=2"))


def test_engines_that_die_are_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    said = Console(record=True, quiet=False, width=200, file=(tmp_path / "said").open("w"))
    overrides = ("cluster.engine_deaths_per_hour=15", "cluster.seed=3", "engine.start_s=1", f"runs_dir={tmp_path}")
    config = load_recipe(str(RECIPE), (*SMALL, *overrides), resolve=discover().resolve)
    summary = run(config, console=said)
    said.file.close()
    assert (tmp_path / "said").read_text().count("a simulated death at the age of") > 0
    assert [step for step, _ in summary.steps] == list(range(1, 9))
    trained = [row for row in journalled(summary) if row[-1] == "trained"]
    assert len(trained) == 8 * 24 * 8 and len({row[:2] for row in trained}) == len(trained)


def test_a_simulated_run_resumes(tmp_path: Path) -> None:
    summary = simulate(tmp_path, "training.max_steps=8")
    database = sqlite3.connect(summary.folder / "journal.sqlite")
    database.execute("DELETE FROM checkpoints WHERE step > 4")
    database.commit()
    database.close()
    again = resume(str(summary.folder), console=Console(quiet=True))
    assert [step for step, _ in again.steps] == list(range(1, 9))
    trained = [row[:2] for row in journalled(again) if row[-1] == "trained"]
    assert len(trained) == len(set(trained)) == 8 * 24 * 8


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"engine": "transformers"}, "engine 'transformers' computes"),
        ({"backend": "torch"}, "backend 'torch' computes"),
    ],
)
def test_real_engines_and_backends_are_refused_in_a_sentence(
    tmp_path: Path, overrides: dict[str, str], said: str
) -> None:
    config = load_recipe(str(RECIPE), (*SMALL, f"runs_dir={tmp_path}"), overrides, discover().resolve)
    with pytest.raises(WorkerFailed, match=said) as caught:
        run(config, console=Console(quiet=True))
    assert "\n" not in str(caught.value)
