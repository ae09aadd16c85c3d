"""The progress of a run: plain lines without a terminal, a bar with one."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from areal.contracts.messages import StepReport
from areal.monitor import progress
from areal.monitor.progress import ProgressView


def report(step: int, reward: float | None = 0.5) -> StepReport:
    metrics = {"staleness/mean": 1.25, "rollout/tokens_per_s": 12345.6}
    return StepReport(
        step=step, version=step, groups=(), metrics=metrics if reward is None else metrics | {"reward/mean": reward}
    )


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=40), text


def test_plain_lines_come_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.5, 101.0, 106.0, 107.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    console, text = plain()
    view = ProgressView(console, 0, 4)
    for step, reward in ((1, 0.0), (2, 1.0), (3, 0.5), (4, 0.5)):
        view.step_finished(report(step, reward))
    view.close()
    assert text.getvalue().splitlines() == [
        "[   0.5 s] step 1/4  reward 0.000  staleness 1.2  12,346 tokens/s",
        "[   6.0 s] step 3/4  reward 0.500  staleness 1.2  12,346 tokens/s",
        "[   7.0 s] step 4/4  reward 0.500  staleness 1.2  12,346 tokens/s",
    ]


def test_the_reward_is_the_mean_of_ten_steps() -> None:
    console, text = plain()
    view = ProgressView(console, 0, 30)
    for step in range(1, 31):
        view.step_finished(report(step, 1.0 if step > 25 else 0.0))
    assert "step 30/30  reward 0.500" in text.getvalue()
    view.close()


def test_steps_without_any_reward() -> None:
    console, text = plain()
    view = ProgressView(console, 0, 1)
    view.step_finished(report(1, None))
    assert "reward nan" in text.getvalue()
    view.close()


def test_what_is_said_is_no_markup() -> None:
    console, text = plain()
    view = ProgressView(console, 0, 1)
    view.say("tracker failed: [/no/such/folder] [bold]not found[/bold] and a long line that is not wrapped anywhere")
    view.close()
    assert text.getvalue().splitlines() == [
        "tracker failed: [/no/such/folder] [bold]not found[/bold] and a long line that is not wrapped anywhere"
    ]


def test_a_terminal_shows_a_bar_with_the_same_numbers() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True, color_system=None)
    view = ProgressView(console, 3, 10)
    view.step_finished(report(4))
    view.say("a line above")
    view.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue())
    assert re.search(r"step .* 4/10 *reward 0\.500  staleness 1\.2  12,346 tokens/s", shown)
    assert "a line above" in shown and "[  " not in shown
