"""One run of the staleness experiment: what is asked of `areal run`, and what its folder says came out."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from measuring.areal_side import metric_lines, newest_run, read_curve, run_areal, step_lines
from measuring.curve import Curve
from measuring.processes import RunFailed

BAR, WINDOW = 0.9, 10
"""The reward to reach, and the steps that it is averaged over."""
LAST = 20
"""Steps that the final reward is averaged over."""
FALL = 0.1
"""A final reward this much below the run's own best is a fall, not noise: a mean of 20 steps is good to about 0.02."""

OWN = (
    "seed",
    "staleness.max",
    "algorithm.objective",
    "training.max_steps",
    "training.minibatches",
    "training.learning_rate",
    "evaluation.every_steps",
    "checkpoint.every_steps",
    "runs_dir",
)
"""Keys of the recipe that the experiment itself sets."""
SPENT = ("journal.sqlite", "journal.sqlite-shm", "journal.sqlite-wal", "model", "checkpoints", "weights", "tensorboard")
"""What a run's folder needs no more once its figures are read; log, recipe, metrics and curve stay."""


class Cell(NamedTuple):
    """What distinguishes one run from the others."""

    objective: str
    bound: int
    seed: int

    @property
    def label(self) -> str:
        return f"{self.objective}, staleness at most {self.bound}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to, as it is saved. Invariant: a run that failed has the figures of the steps it made."""

    objective: str
    bound: int
    seed: int
    ended: str
    """ok, fell (see `FALL`), diverged (a number that is not finite), or failed (an error, or the deadline)."""
    reason: str = ""
    load_before: float
    """Load average when it started: times count only where this is small."""
    figures: dict[str, float | None] = field(default_factory=dict[str, float | None])
    rewards: list[float] = field(default_factory=list[float])
    """Of each step."""
    ages: list[float] = field(default_factory=list[float])
    """Mean staleness of what each step trained on."""

    @property
    def cell(self) -> Cell:
        return Cell(self.objective, self.bound, self.seed)


def settings(cell: Cell, *, steps: int, minibatches: int, learning_rate: float) -> list[str]:
    """Return what the run changes in the bundled recipe.

    The one evaluation comes after the last step and disturbs none: the rewards of training are those of policies up
    to `bound` versions back, and it says how good the last one is.
    """
    return [
        f"seed={cell.seed}",
        f"staleness.max={cell.bound}",
        f"algorithm.objective={cell.objective}",
        f"training.max_steps={steps}",
        f"training.minibatches={minibatches}",
        f"training.learning_rate={learning_rate}",
        f"evaluation.every_steps={steps}",
        "checkpoint.every_steps=0",
    ]


def measure(
    cell: Cell, arguments: Sequence[str], *, folder: Path, cores: int, deadline_s: float, load: float
) -> Outcome:
    """Run once and return what came out; a run that fails is an outcome like any other."""
    shutil.rmtree(folder, ignore_errors=True)
    named: dict[str, Any] = {**cell._asdict(), "load_before": load}
    reason = ""
    try:
        run_areal(cell.label, None, arguments, folder=folder, cores=cores, deadline_s=deadline_s, keep=True)
    except RunFailed as error:
        print(error, flush=True)
        reason = str(error).partition(";")[0]  # what follows leads to a log on this machine
    try:
        run = newest_run(folder)
        outcome = _read(named, run, reason)
    except (OSError, ValueError):
        if not reason:
            raise
        return Outcome(**named, ended="failed", reason=f"{reason}, before its first step")
    for name in SPENT:
        path = run / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return outcome


def _read(named: dict[str, Any], run: Path, reason: str) -> Outcome:
    """Raises OSError or ValueError for a run without any step."""
    steps = step_lines(run)
    if not steps:
        raise ValueError("no step")
    curve = read_curve("", run, 0.0, 0.0)
    recipe = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    figures = figures_of(curve, steps, recipe["training"]["batch_size"])
    figures["reward_evaluated"] = _evaluated(run)
    ended = "failed" if reason else "ok"
    broken = [line["step"] for line in steps if None in (line.get("train/loss"), line.get("train/grad_norm"))]
    if broken:
        ended, reason = "diverged", reason or f"loss or gradient not finite from step {broken[0]} on"
    elif not reason and (figures["fall"] or 0.0) > FALL:
        ended = "fell"
    return Outcome(
        **named,
        ended=ended,
        reason=reason,
        figures=figures,
        rewards=[round(reward, 4) for reward in curve.rewards],
        ages=[round(line["staleness/mean"], 3) for line in steps],
    )


def figures_of(curve: Curve, steps: Sequence[dict[str, Any]], batch_size: int) -> dict[str, float | None]:
    """Return the figures of a run with at least one step of `batch_size` groups; None for what did not happen."""
    reached, at = curve.steps_to(BAR, WINDOW), curve.reached_at(BAR, WINDOW)
    ages = [line["staleness/mean"] for line in steps]
    dropped = steps[-1]["staleness/dropped_groups"]
    smoothed = curve.running_rewards(LAST)
    return {
        "steps": float(len(steps)),
        "reward_first": statistics.fmean(curve.rewards[:WINDOW]),
        "reward_last": smoothed[-1],
        "fall": max(smoothed[LAST - 1 :], default=smoothed[-1]) - smoothed[-1],
        "steps_to_bar": None if reached is None else float(reached),
        "version_at_bar": None if reached is None else reached - statistics.fmean(ages[reached - WINDOW : reached]),
        "to_bar_s": None if at is None else at - curve.began,
        "step_s": curve.median_step_s() if curve.step_s else None,
        "wait_share": curve.extra["wait_share"],
        "age_mean": statistics.fmean(ages),
        "age_learning": statistics.fmean(ages[:reached]),
        "age_max": max(line["staleness/max"] for line in steps),
        "dropped_share": dropped / (dropped + len(steps) * batch_size),
        "masked_share": _total(steps, "staleness/masked_tokens") / max(1.0, _total(steps, "rollout/tokens")),
        "behavior_kl": _mean(steps, "train/behavior_kl"),
        "behavior_dropped": _mean(steps, "train/behavior_dropped"),
        "clip_fraction": _mean(steps, "train/clip_fraction"),
    }


def _evaluated(run: Path) -> float | None:
    """Return the greedy reward of the last policy on test prompts, if the run came so far."""
    values = [line["eval/reward/mean"] for line in metric_lines(run) if "eval/reward/mean" in line]
    return values[-1] if values else None


def _numbers(steps: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return what the steps say; one that had nothing to learn from says nothing."""
    return [line[name] for line in steps if line.get(name) is not None]


def _total(steps: Sequence[dict[str, Any]], name: str) -> float:
    return sum(_numbers(steps, name))


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    values = _numbers(steps, name)
    return statistics.fmean(values) if values else None
