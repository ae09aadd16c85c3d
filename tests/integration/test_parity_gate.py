"""A run refuses to start when engine and trainer are not the same policy, and reports the figure while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from areal.app import run
from areal.config import RunConfig, load_recipe
from areal.errors import ParityError
from areal.monitor.summary import Summary
from areal.plugins import discover

SMALL = (
    "training.max_steps=3",
    "training.batch_size=2",
    "training.warmup.steps=2",
    "algorithm.group_size=2",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=0",
    "cluster.name=inline",
    "trackers=[jsonl]",
)


def recipe(tmp_path: Path, *more: str) -> RunConfig:
    return load_recipe(None, (*SMALL, f"runs_dir={tmp_path}", *more), resolve=discover().resolve)


def started(tmp_path: Path, *more: str) -> Summary:
    return run(recipe(tmp_path, *more), console=Console(quiet=True))


def test_a_rounding_engine_is_refused_by_a_tight_bound_only(tmp_path: Path) -> None:
    """Engine weights in bfloat16, the trainer's in float32: a real difference of a real size."""
    rounded = "model.dtype=bfloat16"
    with pytest.raises(ParityError) as caught:
        started(tmp_path, rounded, "parity.max_mean=1e-7")
    said = str(caught.value)
    assert "engine and trainer disagree about the same weights: over " in said and "\n" not in said
    assert "dtype" in said and "parity.max_mean" in said
    steps = started(tmp_path, rounded).steps
    assert 1e-7 < steps[0][1]["parity/mean"] < 0.05 and steps[0][1]["parity/tokens"] > 0
    started(tmp_path, rounded, "parity.max_mean=1e-7", "parity.prompts=0")


def test_the_figure_is_in_every_steps_report(tmp_path: Path) -> None:
    steps = started(tmp_path, "parity.every_steps=1", "staleness.max=1").steps
    assert len(steps) == 3
    assert all(0 <= metrics["parity/mean"] < 1e-4 and 0 <= metrics["parity/kl"] < 1e-4 for _, metrics in steps)
