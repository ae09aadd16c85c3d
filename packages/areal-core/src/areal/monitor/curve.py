"""The reward curve, in the terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

BLOCKS = " ▁▂▃▄▅▆▇█"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean over the last `window` values, of the same length."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1) for i in range(len(values))]


def terminal_curve(values: Sequence[float], *, width: int = 60, height: int = 8) -> str:
    """Return the curve as lines of block characters with the scale at the left; empty without values."""
    columns = [value for value in _resample(values, width) if math.isfinite(value)]
    if not columns:
        return ""
    low, high = min(columns), max(columns)
    # Halves, because the distance of two floats need not be one.
    span = (high / 2 - low / 2) or 1.0
    levels = [(value / 2 - low / 2) / span * height for value in columns]
    lines: list[str] = []
    for row in reversed(range(height)):
        cells = (BLOCKS[round(min(max(level - row, 0.0), 1.0) * 8)] for level in levels)
        label = high if row == height - 1 else low if row == 0 else None
        lines.append(f"{'' if label is None else f'{label:.2f}':>6} ┤{''.join(cells)}")
    return "\n".join(lines)


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def save_curve(steps: Sequence[int], rewards: Sequence[float], path: Path, title: str) -> None:
    """Write a PNG of the mean reward per training step and its running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="0.75", linewidth=0.8, label="per step")
    axes.plot(steps, smooth(rewards, 10), color="tab:blue", linewidth=1.8, label="mean of 10 steps")
    axes.set(xlabel="training step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
