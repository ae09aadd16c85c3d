"""The bar that shows step, reward, staleness and tokens per second; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from areal.contracts.messages import StepReport

PLAIN_LINE_EVERY_S = 5.0
SMOOTHED_STEPS = 10
"""Rewards of single steps jump; the mean of ten shows the way."""


class ProgressView:
    """Invariant: shows only numbers of finished steps."""

    def __init__(self, console: Console, first_step: int, max_steps: int) -> None:
        self._console = console
        self._max_steps = max_steps
        self._rewards: deque[float] = deque(maxlen=SMOOTHED_STEPS)
        self._last_line = 0.0
        self._began = time.perf_counter()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("step", total=max_steps, completed=first_step, numbers="")
        self._bar.start()

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step_finished(self, report: StepReport) -> None:
        numbers = self._numbers(report)
        self._bar.update(self._task, completed=report.step, numbers=numbers)
        now = time.perf_counter()
        last = report.step == self._max_steps
        if not self._console.is_terminal and (last or now - self._last_line >= PLAIN_LINE_EVERY_S):
            self._last_line = now
            self.say(f"[{now - self._began:6.1f} s] step {report.step}/{self._max_steps}  {numbers}")

    def went_back(self, step: int) -> None:
        """Show that the run goes on from an earlier step."""
        self._bar.update(self._task, completed=step)

    def _numbers(self, report: StepReport) -> str:
        metrics = report.metrics
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else float("nan")
        return (
            f"reward {reward:.3f}  staleness {metrics.get('staleness/mean', 0.0):.1f}  "
            f"{metrics.get('rollout/tokens_per_s', 0.0):,.0f} tokens/s"
        )

    def close(self) -> None:
        self._bar.stop()
