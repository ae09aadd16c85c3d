"""What a run came to: a table, the curve, and where things lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal.monitor.curve import save_curve, smooth, terminal_curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Invariant: every number comes from the journal's steps."""

    name: str
    folder: Path
    checkpoint: Path
    """The saved Hugging Face folder."""
    seconds: float
    """From the command's start to its end."""
    steps: Sequence[tuple[int, Mapping[str, float]]]
    evaluations: Sequence[tuple[int, Mapping[str, float]]]

    @property
    def rewards(self) -> list[float]:
        return [metrics["reward/mean"] for _, metrics in self.steps if "reward/mean" in metrics]

    def show(self, console: Console) -> None:
        """Print the table and the curve, and write ``reward.png`` into the run's folder."""
        console.print(self._table())
        rewards = self.rewards
        if len(rewards) > 1:
            console.print("\nmean reward, mean of 10 steps", highlight=False)
            console.print(terminal_curve(smooth(rewards, 10), width=min(60, console.width - 10)), highlight=False)
            picture = self.folder / "reward.png"
            numbers = [step for step, metrics in self.steps if "reward/mean" in metrics]
            save_curve(numbers, rewards, picture, self.name)
            _say(console, f"\ncurve       {picture}")
        _say(console, f"run         {self.folder}")
        _say(console, f"checkpoint  {self.checkpoint}")

    def _table(self) -> Table:
        table = Table(title=Text(f"run {self.folder.name}"), show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(justify="right")
        for label, value in self._rows():
            table.add_row(label, value)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        steps, rewards = self.steps, self.rewards
        tokens = sum(metrics.get("rollout/tokens", 0.0) for _, metrics in steps)
        failed = sum(m.get("rollout/errors", 0.0) + m.get("rollout/timeouts", 0.0) for _, m in steps)
        train_s = sum(metrics.get("time/step_s", 0.0) for _, metrics in steps)
        rows = [("steps", f"{len(steps)}"), ("wall time", f"{self.seconds:.1f} s")]
        if rewards:
            first, last = rewards[:10], rewards[-10:]
            rows.append(("reward, first 10 steps", f"{sum(first) / len(first):.3f}"))
            rows.append(("reward, last 10 steps", f"{sum(last) / len(last):.3f}"))
        if steps:
            last_metrics = steps[-1][1]
            rows += [
                ("time per step", f"{train_s / len(steps):.3f} s"),
                ("tokens trained", f"{tokens:,.0f} ({tokens / max(train_s, 1e-9):,.0f} per s)"),
                ("staleness, mean / max", _staleness(steps)),
                ("groups dropped as stale", f"{last_metrics.get('staleness/dropped_groups', 0.0):.0f}"),
                ("episodes without reward", f"{failed:.0f}"),
            ]
        if self.evaluations:
            step, metrics = self.evaluations[-1]
            rows.append((f"evaluation reward, step {step}", f"{metrics.get('eval/reward/mean', float('nan')):.3f}"))
        return rows


def _say(console: Console, text: str) -> None:
    # Folders may have brackets in their names, which are not rich's.
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _staleness(steps: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    means = [metrics.get("staleness/mean", 0.0) for _, metrics in steps]
    return f"{sum(means) / len(means):.2f} / {max(m.get('staleness/max', 0.0) for _, m in steps):.0f}"
