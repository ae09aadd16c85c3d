"""The staleness experiment as a table, a plot and a few sentences; all of it from the saved outcomes."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from measuring.stale_run import BAR, LAST, WINDOW, Outcome

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""Marks on a page; the table and what belongs to it go between them."""
REACHED = 0.75
"""A bound counts as reached when samples were at least this share of it old while the policy learned."""
COLOURS = {"naive": "tab:red", "decoupled": "tab:blue"}
SMOOTH = 10

Cells = Mapping[tuple[str, int], Sequence[Outcome]]


def by_cell(outcomes: Iterable[Outcome]) -> dict[tuple[str, int], list[Outcome]]:
    """Return the runs of each objective and bound, in the order of objective and bound."""
    found: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.objective != "naive", outcome.bound, outcome.seed)):
        found.setdefault((outcome.objective, outcome.bound), []).append(outcome)
    return found


def values(runs: Iterable[Outcome], figure: str) -> list[float]:
    """Return a figure of all runs that made all their steps and have it."""
    found = (run.figures.get(figure) for run in runs if run.ended != "failed")
    return [value for value in found if value is not None]


def spread(runs: Sequence[Outcome], figure: str, digits: int, scale: float = 1.0) -> str:
    """Return ``mean ± standard deviation`` over the seeds, and how many have the figure when not all whole runs do."""
    known = [value * scale for value in values(runs, figure)]
    if not known:
        return "-"
    text = f"{statistics.fmean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known):.{digits}f}"
    whole = sum(run.ended != "failed" for run in runs)
    return text if len(known) == whole else f"{text} ({len(known)} of {whole})"


def _ends(runs: Sequence[Outcome]) -> str:
    return ", ".join(f"{number} {ended}" for ended, number in Counter(run.ended for run in runs).items())


COLUMNS: Mapping[str, Callable[[Sequence[Outcome]], str]] = {
    "objective": lambda runs: runs[0].objective,
    "bound": lambda runs: str(runs[0].bound),
    "measured, learning": lambda runs: spread(runs, "age_learning", 1),
    "measured, all": lambda runs: spread(runs, "age_mean", 1),
    f"reward, last {LAST} steps": lambda runs: spread(runs, "reward_last", 3),
    "reward, last policy": lambda runs: spread(runs, "reward_evaluated", 3),
    f"steps to {BAR}": lambda runs: spread(runs, "steps_to_bar", 0),
    f"version at {BAR}": lambda runs: spread(runs, "version_at_bar", 0),
    f"s to {BAR}": lambda runs: spread(runs, "to_bar_s", 0),
    "s a step": lambda runs: spread(runs, "step_s", 2),
    "groups dropped, %": lambda runs: spread(runs, "dropped_share", 2, 100),
    "tokens masked, %": lambda runs: spread(runs, "masked_share", 2, 100),
    "tokens clipped, %": lambda runs: spread(runs, "clip_fraction", 1, 100),
    "beyond the cap, %": lambda runs: spread(runs, "behavior_dropped", 2, 100),
    "KL, nats": lambda runs: spread(runs, "behavior_kl", 4),
    "runs": _ends,
}


def markdown(outcomes: Sequence[Outcome]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows = ([column(runs) for column in COLUMNS.values()] for runs in by_cell(outcomes).values())
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def conclusions(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what follows from the figures, one sentence each; the opinions are the page's."""
    cells = by_cell(outcomes)
    lines = [_ages(cells)]
    for figure, words, later_is_worse in (
        ("reward_last", f"reward of the last {LAST} steps", False),
        ("version_at_bar", f"version that reached {BAR}", True),
    ):
        lines += _beyond_noise(cells, figure, words, later_is_worse=later_is_worse)
    bad = [": ".join(filter(None, (run.cell.label, run.ended, run.reason))) for run in outcomes if run.ended != "ok"]
    return [line for line in lines if line] + bad


def _ages(cells: Cells) -> str:
    """Say which bounds the samples really came near to."""
    found: list[str] = []
    short: list[str] = []
    for bound in sorted({bound for _, bound in cells if bound}):
        runs = [run for (_, other), runs in cells.items() if other == bound for run in runs]
        if not (ages := values(runs, "age_learning")):
            continue
        age, wait = statistics.fmean(ages), statistics.fmean(values(runs, "wait_share"))
        found.append(f"{bound}: {age:.1f} ({wait:.0%})")
        short += [str(bound)] * (age < REACHED * bound)
    return (
        "measured staleness while learning, by bound (and the trainer's share of time spent waiting for samples): "
        f"{', '.join(found)}; less than {REACHED:.0%} of the bound: {', '.join(short) or 'none'}"
        if found
        else ""
    )


def _beyond_noise(cells: Cells, figure: str, words: str, *, later_is_worse: bool) -> list[str]:
    """Compare each mean with the range of all synchronous runs, which differ by nothing but seeds and rounding."""
    synchronous = [value for (_, bound), runs in cells.items() if bound == 0 for value in values(runs, figure)]
    if not synchronous:
        return []
    low, high = min(synchronous), max(synchronous)
    lines = [f"{words}, {len(synchronous)} synchronous runs: {low:.3f} to {high:.3f}"]
    for objective in dict.fromkeys(objective for objective, _ in cells):
        worse: list[str] = []
        for (name, bound), runs in cells.items():
            if name != objective or bound == 0:
                continue
            known = values(runs, figure)
            mean = statistics.fmean(known) if known else None
            if mean is None or (mean > high if later_is_worse else mean < low):
                worse.append(f"{bound} ({'never' if mean is None else format(mean, '.3f')})")
        lines.append(f"{words}, {objective}: worse than every synchronous run at {', '.join(worse) or 'no bound'}")
    return lines


def write_table(outcomes: Sequence[Outcome], settings: Mapping[str, Any], path: Path, plot: Path | None) -> None:
    """Write the results as Markdown: between the marks of a page that has them, else as the whole file."""
    loads = [run.load_before for run in outcomes]
    changed = f"; changed: {', '.join(settings['overrides'])}" if settings["overrides"] else ""
    head = (
        f"{len(outcomes)} runs of {settings['steps']} steps, {settings['minibatches']} mini-batches a step, "
        f"learning rate {settings['learning_rate']:g}, {settings['cores']} cores, "
        f"load average before a run {min(loads):.2f} to {max(loads):.2f}{changed}."
    )
    parts = [
        head,
        markdown(outcomes),
        "\n".join(f"- {line}" for line in conclusions(outcomes)),
    ]
    if plot is not None and plot.exists():
        parts.append(f"![reward, steps, divergence and staleness by bound]({os.path.relpath(plot, path.parent)})")
    body = "\n\n".join(parts)
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        body = f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"
    else:
        body += "\n"
    path.write_text(body, encoding="utf-8")


def write_plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a PNG: above the curves by bound and what was measured of staleness, below what it did."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = by_cell(outcomes)
    figure = Figure(figsize=(14, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    (naive, decoupled, ages), below = figure.subplots(2, 3)
    _curves(naive, cells, "naive", "reward, naive", lambda run: run.rewards)
    _curves(decoupled, cells, "decoupled", "reward, decoupled", lambda run: run.rewards)
    aged = next(iter(reversed(cells)))[0]  # decoupled, unless only naive was asked for
    _curves(ages, cells, aged, f"measured staleness, {aged}", lambda run: run.ages)
    for axes, (name, title) in zip(
        below,
        {
            "reward_last": f"reward, mean of the last {LAST} steps",
            "version_at_bar": f"policy version that reached {BAR} (mean of {WINDOW} steps)",
            "behavior_kl": "mean KL of behaviour and proximal policy, nats",
        }.items(),
        strict=True,
    ):
        _by_bound(axes, cells, name, title)
    figure.savefig(path)


def _curves(axes: Any, cells: Cells, objective: str, title: str, series: Callable[[Outcome], Sequence[float]]) -> None:
    """Draw for each bound the mean over its seeds, smoothed; a run that broke off counts as far as it came."""
    from matplotlib import colormaps

    chosen = {bound: runs for (name, bound), runs in cells.items() if name == objective}
    for number, (bound, runs) in enumerate(chosen.items()):
        columns = zip_longest(*(series(run) for run in runs))
        means = [statistics.fmean(value for value in column if value is not None) for column in columns]
        smooth = [statistics.fmean(means[max(0, n - SMOOTH) : n]) for n in range(1, len(means) + 1)]
        colour = colormaps["viridis"](0.9 * number / max(1, len(chosen) - 1))
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=1.5, label=f"at most {bound}")
    axes.set(xlabel=f"training step (mean of {SMOOTH})", title=title)
    axes.grid(alpha=0.3)
    if chosen:
        axes.legend(fontsize="small")


def _by_bound(axes: Any, cells: Cells, figure: str, title: str) -> None:
    """Draw a figure against the bound: a dot for each run, a line through the means, the synchronous range."""
    synchronous = [value for (_, bound), runs in cells.items() if bound == 0 for value in values(runs, figure)]
    if len(synchronous) > 1:
        axes.axhspan(min(synchronous), max(synchronous), color="0.85", label="range of the synchronous runs")
    for shift, objective in enumerate(dict.fromkeys(objective for objective, _ in cells)):
        means: dict[int, float] = {}
        for (name, bound), runs in cells.items():
            if name == objective and (known := values(runs, figure)):
                means[bound] = statistics.fmean(known)
                axes.plot([bound * 1.04**shift] * len(known), known, "o", color=COLOURS[objective], alpha=0.4)
        axes.plot(list(means), list(means.values()), "-", color=COLOURS[objective], label=objective)
    ticks = sorted({bound for _, bound in cells})
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="staleness at most", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
