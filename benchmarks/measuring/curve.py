"""What a run did over time, whichever side made it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FILLING_STEPS = 2
"""Steps that are no measure of speed: caches, memory and queues fill."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run. Times are seconds since 1970. Invariant: `times` and `rewards` have an entry for each step, in order."""

    label: str
    started: float
    """When the command was given."""
    began: float
    """When the first prompt was issued: model loaded, workers there, warm-up done."""
    ended: float
    times: Sequence[float]
    """When each step was finished."""
    rewards: Sequence[float]
    """Mean reward of each step's samples."""
    lengths: Sequence[float] = ()
    """Answer lengths in tokens: of all samples, or what the side reports."""
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers worth printing."""

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step after the filling ones: the time between the ends of two steps."""
        pairs = zip(self.times[FILLING_STEPS - 1 :], self.times[FILLING_STEPS:], strict=False)
        return [later - earlier for earlier, later in pairs]

    def mean_step_s(self) -> float:
        return statistics.fmean(self.step_s) if self.step_s else float("nan")

    def median_step_s(self) -> float:
        return statistics.median(self.step_s) if self.step_s else float("nan")

    def running_rewards(self, window: int) -> list[float]:
        """Return the mean of the last `window` rewards at each step, of as many as there are at the beginning."""
        return [statistics.fmean(self.rewards[max(0, n - window) : n]) for n in range(1, len(self.rewards) + 1)]

    def reached_at(self, bar: float, window: int) -> float | None:
        """Return when the mean of `window` rewards first was at least `bar`, or None."""
        for time, reward in list(zip(self.times, self.running_rewards(window), strict=True))[window - 1 :]:
            if reward >= bar:
                return time
        return None

    def steps_to(self, bar: float, window: int) -> int | None:
        """Return the number of the step at which the mean of `window` rewards first was at least `bar`, or None."""
        reached = self.reached_at(bar, window)
        return None if reached is None else list(self.times).index(reached) + 1

    def reward_at(self, time: float, window: int) -> float | None:
        """Return the mean of `window` rewards at a time; None before the first step."""
        done = sum(finished <= time for finished in self.times)
        return self.running_rewards(window)[done - 1] if done else None

    def summary(self, bar: float, window: int) -> dict[str, float | None]:
        """Return the figures of this run, as they are printed and saved."""
        reached = self.reached_at(bar, window)
        return {
            "steps": len(self.times),
            "median_step_s": self.median_step_s(),
            "mean_step_s": self.mean_step_s(),
            "to_first_prompt_s": self.began - self.started,
            "to_last_step_s": self.times[-1] - self.started,
            "to_bar_s": None if reached is None else reached - self.began,
            "to_bar_from_command_s": None if reached is None else reached - self.started,
            "reward_first": statistics.fmean(self.rewards[:window]),
            "reward_last": statistics.fmean(self.rewards[-window:]),
            **self.extra,
        }


def spread(lengths: Sequence[float]) -> dict[str, float]:
    """Return how long answers were: mean, median, 90th percentile and longest, in tokens."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    return {
        "tokens_mean": statistics.fmean(ordered),
        "tokens_median": statistics.median(ordered),
        "tokens_p90": ordered[int(0.9 * (len(ordered) - 1))],
        "tokens_max": ordered[-1],
    }


def median_of(summaries: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the median of each figure; None where a round has none, for it did not reach the bar."""
    result: dict[str, float | None] = {}
    for key in summaries[0]:
        values = [summary[key] for summary in summaries]
        known = [value for value in values if value is not None]
        result[key] = statistics.median(known) if len(known) == len(values) else None
    return result


def table(rows: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table with a column for each key of `rows` and a line for each figure."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    width = max(len(name) for name in names) + 2
    widths = {label: max(len(label), 10) + 2 for label in rows}
    lines = ["".ljust(width) + "".join(label.rjust(widths[label]) for label in rows)]
    for name in names:
        cells = (show(row.get(name)).rjust(widths[label]) for label, row in rows.items())
        lines.append(name.ljust(width) + "".join(cells))
    return "\n".join(lines)


def show(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
