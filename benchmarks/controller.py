"""What the control plane costs: trajectories a second under the real controller, over simulated workers.

    python benchmarks/controller.py [--trajectories 1000,100000,1000000] [--replicas 1000] [--out FILE]

Each size is one `areal run` on the cluster ``sim``: virtual clock, real loop, crew, fleet, publisher, staleness law,
SQLite journal; rollout workers, agents and tokenizer run in the same process and are in the figures, tokens and
gradients are not computed. Answers are short (8 to 32 tokens), so the figures are costs of a trajectory and not of its
tokens. Times are of the real clock, from the first prompt issued to the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from measuring.areal_side import newest_run
from measuring.processes import ROOT, RunFailed, areal_command, new_folder, tail

GROUP_SIZE = 8
MOST_GROUPS = 1024
"""Groups of a step; small runs have smaller steps, so that there are some."""
FEWEST_STEPS = 8
SHORTEST, LONGEST, PROMPT = 8, 32, 64
SAMPLE_S = 0.1
EARLY, LATE = (0.2, 0.4), (0.6, 0.8)
"""Parts of the run that are compared: in between, no step is filled for the first time and none is the last."""
SETTLED = 0.1


@dataclass(frozen=True)
class Sample:
    at: float
    rss_mb: float
    cpu_s: float


@dataclass(frozen=True)
class Figures:
    trajectories: int
    replicas: int
    steps: int
    per_second: float
    wall_us: float
    cpu_us: float
    early_us: float
    late_us: float
    """CPU for a trajectory in the `EARLY` and in the `LATE` part of the run."""
    rss_peak_mb: float
    rss_growth_mb: float
    """From a tenth of the run to its end."""
    journal_mb: float


def main() -> None:
    args = arguments()
    folder = new_folder(args.folder, "controller")
    print(f"answers of {SHORTEST} to {LONGEST} tokens, prompts of {PROMPT}, groups of {GROUP_SIZE}; real seconds")
    print(f"{'trajectories':>12} {'replicas':>8} {'per s':>7} {'us wall':>8} {'us cpu':>7} {'early':>9} "
          f"{'late':>7} {'RSS peak':>9} {'grown':>7} {'journal':>8}")  # fmt: skip
    results: list[Figures] = []
    for number in args.trajectories:
        figures = measure(number, args.replicas, folder / str(number), args.deadline_s)
        results.append(figures)
        print(f"{figures.trajectories:>12} {figures.replicas:>8} {figures.per_second:>7.0f} {figures.wall_us:>8.0f} "
              f"{figures.cpu_us:>7.0f} {figures.early_us:>7.0f} {figures.late_us:>7.0f} "
              f"{figures.rss_peak_mb:>6.0f} MB {figures.rss_growth_mb:>4.0f} MB {figures.journal_mb:>5.0f} MB",
              flush=True)  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps([asdict(figures) for figures in results], indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=numbers, default=[1000, 100_000, 1_000_000], help="sizes, with commas")
    parser.add_argument("--replicas", type=int, default=1000, help="most engines; a small run has fewer")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="longest time for one size")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--folder", type=Path, help="where the runs' folders are made")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def recipe(trajectories: int, replicas: int, folder: Path) -> dict[str, Any]:
    groups = max(1, min(MOST_GROUPS, trajectories // GROUP_SIZE // FEWEST_STEPS))
    return {
        "name": "controller",
        "runs_dir": str(folder / "runs"),
        "device": "cpu",
        "cluster": {"name": "sim"},
        "engine": {"name": "sim", "replicas": min(replicas, groups), "max_running": 64, "start_s": 1.0},
        "backend": {"name": "sim", "step_s": 1.0, "s_per_token": 1e-7, "save_s": 1.0},
        "reshard": {"name": "sim", "transfer_s": 0.5},
        "environments": [{
            "name": "sim", "type": "sim", "prompt_chars": PROMPT, "shortest": SHORTEST, "spread": LONGEST / SHORTEST
        }],
        "training": {"batch_size": groups, "max_steps": max(1, trajectories // (groups * GROUP_SIZE))},
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE},
        "staleness": {"max": 2},
        "rollout": {"episode_timeout_s": 3600.0},
        "checkpoint": {"every_steps": 0},
        "trackers": ["jsonl"],
    }  # fmt: skip


def measure(trajectories: int, replicas: int, folder: Path, deadline_s: float) -> Figures:
    folder.mkdir(parents=True)
    asked = recipe(trajectories, replicas, folder)
    (folder / "recipe.yaml").write_text(json.dumps(asked), encoding="utf-8")
    samples = watch([*areal_command(), "run", str(folder / "recipe.yaml")], folder / "log", deadline_s)
    journal = newest_run(folder) / "journal.sqlite"
    began, steps = times_of(journal)
    size_mb = journal.stat().st_size / 1e6
    journal.unlink()
    per_step = asked["training"]["batch_size"] * GROUP_SIZE
    done = per_step * len(steps)
    inside = [sample for sample in samples if sample.at <= steps[-1]] or samples
    settled = at(samples, began + SETTLED * (steps[-1] - began))
    wall_s = steps[-1] - began
    return Figures(
        trajectories=done,
        replicas=asked["engine"]["replicas"],
        steps=len(steps),
        per_second=done / wall_s,
        wall_us=1e6 * wall_s / done,
        cpu_us=1e6 * (at(samples, steps[-1]).cpu_s - at(samples, began).cpu_s) / done,
        early_us=cpu_us(samples, [began, *steps], EARLY, per_step),
        late_us=cpu_us(samples, [began, *steps], LATE, per_step),
        rss_peak_mb=max(sample.rss_mb for sample in inside),
        rss_growth_mb=at(samples, steps[-1]).rss_mb - settled.rss_mb,
        journal_mb=size_mb,
    )


def cpu_us(samples: list[Sample], ends: list[float], part: tuple[float, float], per_step: int) -> float:
    """Return microseconds of CPU for a trajectory in a part of the run; `ends`: of each step, from step 0 on."""
    first, last = (round(share * (len(ends) - 1)) for share in part)
    spent = at(samples, ends[last]).cpu_s - at(samples, ends[first]).cpu_s
    return 1e6 * spent / (max(1, last - first) * per_step)


def watch(command: list[str], log: Path, deadline_s: float) -> list[Sample]:
    """Run a command and look at its process now and then; RunFailed when it fails or takes too long."""
    print(f"  load average {os.getloadavg()[0]:.2f}; running: {' '.join(command)}", flush=True)
    samples: list[Sample] = []
    end = time.time() + deadline_s
    with log.open("w", encoding="utf-8") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            try:
                cpu = process.cpu_times()
                samples.append(Sample(time.time(), process.memory_info().rss / 1e6, cpu.user + cpu.system))
            except psutil.Error:
                break  # it has just ended
            if time.time() > end:
                process.kill()
                raise RunFailed(f"no end within {deadline_s:g} s; the log is {log}\n{tail(log)}")
            time.sleep(SAMPLE_S)
        if code := process.wait():
            raise RunFailed(f"the command ended with {code}; the log is {log}\n{tail(log)}")
    return samples


def times_of(journal: Path) -> tuple[float, list[float]]:
    """Return when the first prompt was issued and when each step ended (seconds since 1970)."""
    database = sqlite3.connect(journal)
    try:
        ((began,),) = database.execute("SELECT min(issued_at) FROM groups")
        return began, [at for (at,) in database.execute("SELECT finished_at FROM steps ORDER BY step")]
    finally:
        database.close()


def at(samples: list[Sample], moment: float) -> Sample:
    """Return the first sample not before a moment, or the last one."""
    return samples[min(bisect_left(samples, moment, key=lambda sample: sample.at), len(samples) - 1)]


if __name__ == "__main__":
    main()
