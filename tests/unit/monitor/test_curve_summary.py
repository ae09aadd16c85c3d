"""The reward curve and the table at the end."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from areal.monitor.curve import BLOCKS, save_curve, smooth, terminal_curve
from areal.monitor.summary import Summary


def test_the_running_mean() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert smooth([1.0, 3.0], 10) == [1.0, 2.0]
    assert smooth([], 3) == []


def test_a_rising_curve() -> None:
    lines = terminal_curve([0.0, 0.25, 0.5, 0.75, 1.0], width=60, height=2).splitlines()
    assert lines == ["  1.00 ┤   ▄█", "  0.00 ┤ ▄███"]


def test_what_is_not_finite_is_left_out_of_the_curve() -> None:
    assert terminal_curve([0.0, float("inf"), 1.0, float("nan")], width=60, height=1) == "  1.00 ┤ █"
    assert terminal_curve([float("nan")]) == ""
    assert len(terminal_curve([-1.7e308, 1.7e308], height=2).splitlines()) == 2


def test_a_long_curve_is_averaged_into_the_width() -> None:
    lines = terminal_curve([float(i // 100) for i in range(600)], width=6, height=5).splitlines()
    assert lines[0] == "  5.00 ┤     █" and lines[-1] == "  0.00 ┤ █████"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 70), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_curve_keeps_its_shape(values: list[float], width: int, height: int) -> None:
    lines = terminal_curve(values, width=width, height=height).splitlines()
    assert len(lines) == height
    cells = [line.split("┤", 1)[1] for line in lines]
    assert {len(row) for row in cells} == {min(width, len(values))}
    assert set("".join(cells)) <= set(BLOCKS)
    for column in zip(*cells, strict=True):
        heights = [BLOCKS.index(cell) for cell in column]
        assert heights == sorted(heights), "no holes: a column is filled from below"


def test_nothing_and_flat() -> None:
    assert terminal_curve([]) == ""
    assert terminal_curve([0.5, 0.5], height=2).splitlines() == ["  0.50 ┤  ", "  0.50 ┤  "]


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "reward.png"
    save_curve([1, 2, 3], [0.0, 0.5, 1.0], path, "run")
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("PNG", (960, 540))
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 10, "something is drawn"


def step(number: int, reward: float | None, **more: float) -> tuple[int, Mapping[str, float]]:
    metrics = {"time/step_s": 0.5, "rollout/tokens": 1000.0, "staleness/mean": 1.0, "staleness/max": 2.0}
    return number, metrics | ({} if reward is None else {"reward/mean": reward}) | more


def shown(summary: Summary) -> tuple[str, dict[str, str]]:
    """Return the whole text and the table's rows."""
    console = Console(record=True, width=100, file=io.StringIO())
    summary.show(console)
    text = console.export_text()
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in text.splitlines() if "│" in line]
    return text, {row[0]: row[1] for row in rows if len(row) == 2}


def make(folder: Path, *steps: tuple[int, Mapping[str, float]], **more: Any) -> Summary:
    folder.mkdir(exist_ok=True)
    values = {"name": "math", "checkpoint": folder / "checkpoints/step/model", "seconds": 12.34, "evaluations": []}
    return Summary(folder=folder, steps=steps, **(values | more))


def test_the_table_and_what_lies_where(tmp_path: Path) -> None:
    steps = [step(number, number / 20) for number in range(1, 20)]
    last = {"rollout/errors": 2.0, "rollout/timeouts": 1.0, "staleness/dropped_groups": 4.0, "staleness/max": 3.0}
    evaluations = [(10, {"eval/reward/mean": 0.25}), (20, {"eval/reward/mean": 0.875})]
    summary = make(tmp_path / "run [1]", *steps, step(20, 1.0, **last), evaluations=evaluations)
    text, rows = shown(summary)
    assert rows == {
        "steps": "20",
        "wall time": "12.3 s",
        "reward, first 10 steps": "0.275",
        "reward, last 10 steps": "0.775",
        "time per step": "0.500 s",
        "tokens trained": "20,000 (2,000 per s)",
        "staleness, mean / max": "1.00 / 3",
        "groups dropped as stale": "4",
        "episodes without reward": "3",
        "evaluation reward, step 20": "0.875",
    }
    assert "run run [1]" in text and "0.05 ┤" in text
    picture = tmp_path / "run [1]/reward.png"
    assert picture.stat().st_size > 1000
    paths = [" ".join(line.split()) for line in text.splitlines()]
    assert f"curve {picture}" in paths and f"run {summary.folder}" in paths
    assert f"checkpoint {summary.checkpoint}" in paths


@pytest.mark.parametrize("steps", [(), (step(1, 0.5),), (step(1, None), step(2, None))])
def test_runs_with_nothing_to_draw(tmp_path: Path, steps: tuple[tuple[int, Mapping[str, float]], ...]) -> None:
    text, rows = shown(make(tmp_path / "short", *steps))
    assert rows["steps"] == str(len(steps))
    assert ("reward, last 10 steps" in rows) == (len(steps) == 1)
    assert not (tmp_path / "short/reward.png").exists() and "┤" not in text
    assert "checkpoint" in text


def test_steps_without_reward_are_left_out_of_the_curve(tmp_path: Path) -> None:
    summary = make(tmp_path / "run", step(1, 0.0), step(2, None), step(3, 1.0))
    assert summary.rewards == [0.0, 1.0]
    _, rows = shown(summary)
    assert rows["reward, first 10 steps"] == "0.500"
