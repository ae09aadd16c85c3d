"""Does anything grow? A long run of the tiny task in pieces, its processes and files measured all the time.

    python benchmarks/soak.py [--steps 10000] [--piece 2500] [--out FILE] [KEY.SUB=VALUE ...]

`areal run` makes the first --piece steps, `areal resume` with a higher `training.max_steps` the next ones, and so on,
with 2 engines, 2 rollout workers and a journal that is compacted all the time. Every --every-s seconds the table gets
a row: memory, open files and threads of each process, sizes of the journal and of the run's folder, and how late the
controller's event loop was.

Printed for each figure: the first and the last row after warm-up, and the slope per 1,000 steps by least squares,
within the pieces: one slope for all, a level for each, since a resumed run has new processes. The first --warm-up
steps of each piece are left out: an engine remembers its last 20 MB of answers, here those of some 850 steps. Flat
means less than 1 % of the level per 1,000 steps, or less than twice the slope's standard error.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil
from measuring.live_run import LiveRun
from measuring.processes import new_folder, tail

RECIPE = (
    "name=soak",
    "environments=[{name: reverse, type: reverse_digits}, {name: scored, type: 'measuring.scored:ScoredDigits'}]",
    "engine.replicas=2",
    "rollout.workers=2",
    "training.batch_size=4",
    "training.learning_rate=2e-4",
    "training.schedule=constant",
    "checkpoint.every_steps=50",
    "evaluation.every_steps=200",
    "trackers=[jsonl]",
    "journal.max_mb=1",
)
LAG = ("controller/lag_mean_s", "controller/lag_max_s")
KNOWN_TO_GROW = ("folder MB", "journal MB", "metrics.jsonl MB")
FLAT_SHARE = 0.01
NO_STEP_S = 300.0


@dataclass(frozen=True)
class Row:
    """What was seen at one moment. Invariant: `figures` has only what could be read."""

    piece: int
    step: int
    at_s: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Slope:
    first: float
    last: float
    per_1000: float
    error: float
    """Standard error of `per_1000`, of rows taken as independent."""

    @property
    def verdict(self) -> str:
        level = max(abs(self.first), abs(self.last), 1e-9)
        if abs(self.per_1000) < max(FLAT_SHARE * level, 2 * self.error):
            return "flat"
        return "grows" if self.per_1000 > 0 else "falls"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="training steps in all")
    parser.add_argument("--piece", type=int, default=2_500, help="steps until the run ends and is resumed")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two rows")
    parser.add_argument("--warm-up", type=int, default=1_000, help="first steps of each piece that are left out")
    parser.add_argument("--folder", type=Path, help="for the run, its log and the table")
    parser.add_argument("--out", type=Path, help="JSON file for the slopes")
    parser.add_argument("override", nargs="*", metavar="KEY.SUB=VALUE", help="changes to the recipe")
    args = parser.parse_args()
    folder = new_folder(args.folder, "soak")
    print(f"load average {os.getloadavg()[0]:.2f}; folder {folder}", flush=True)
    run = LiveRun(folder, [*RECIPE, f"training.max_steps={min(args.piece, args.steps)}", *args.override])
    began, rows = time.monotonic(), list[Row]()
    try:
        for piece, end in enumerate(range(args.piece, args.steps + args.piece, args.piece)):
            go_to(run, piece, min(end, args.steps), rows, args.every_s)
            print(f"step {run.last_step()} after {time.monotonic() - began:.0f} s, {len(rows)} rows", flush=True)
    finally:
        run.end()
        write(rows, folder / "rows.csv")
    slopes = {
        name: slope_of(rows, name, args.warm_up) for name in sorted({name for row in rows for name in row.figures})
    }
    show(slopes)
    done = {
        "steps": run.last_step(),
        "seconds": time.monotonic() - began,
        "resumes": run.num_resumes,
        "rows": len(rows),
    }
    print(", ".join(f"{name} {value:.0f}" for name, value in done.items()))
    if args.out:
        report = {name: vars(slope) | {"verdict": slope.verdict} for name, slope in slopes.items() if slope}
        args.out.write_text(json.dumps(done | {"slopes": report}, indent=2) + "\n", encoding="utf-8")
    grown = [name for name, slope in slopes.items() if slope and slope.verdict == "grows" and name not in KNOWN_TO_GROW]
    return 1 if grown else 0


def go_to(run: LiveRun, piece: int, end: int, rows: list[Row], every_s: float) -> None:
    """Make one piece and add its rows; SystemExit when it fails."""
    run.resume(end) if piece else run.start()
    progress, furthest, known = time.monotonic(), run.last_step(), dict[int, psutil.Process]()
    while run.code is None:
        time.sleep(every_s)
        known |= run.everybody()
        step = run.last_step()
        if step > furthest:
            furthest, progress = step, time.monotonic()
            figures = look(run)
            if run.last_step() < end:  # else the run is being taken down
                rows.append(Row(piece, step, time.monotonic(), figures))
        if time.monotonic() - progress > NO_STEP_S:
            raise SystemExit(f"no step beyond {furthest} for {NO_STEP_S:g} s\n{tail(run.log)}")
    if run.code:
        raise SystemExit(f"the run ended with {run.code}\n{tail(run.log)}")
    if left := run.left_behind(known):
        raise SystemExit(f"outlived the run: {'; '.join(left)}")


def look(run: LiveRun) -> dict[str, float]:
    """Return memory (MB), open files and threads of each process, sizes (MB) of files, and the controller's lag (s)."""
    figures: dict[str, float] = {}
    workers = run.workers()
    groups = {"controller": [run.controller], "scorers": run.scorers()}
    for name, process in [*((f"ray {name}", process) for name, process in run.ray_processes()), *workers.items()]:
        groups.setdefault(name, []).append(process)
    for name, processes in groups.items():
        for process in processes:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                for what, value in (
                    ("MB", process.memory_info().rss / 1e6),
                    ("files", process.num_fds()),
                    ("threads", process.num_threads()),
                ):
                    figures[f"{name} {what}"] = figures.get(f"{name} {what}", 0.0) + value
    # Checkpoints go while their folder is being read: os.walk bears that.
    files = [Path(folder, name) for folder, _, names in os.walk(run.path) for name in names]
    sizes = {path: size_of(path) for path in files}
    figures["folder MB"] = sum(sizes.values()) / 1e6
    figures["folder files"] = len(sizes)
    figures["logs MB"] = sum(size for path, size in sizes.items() if path.parent.name == "logs") / 1e6
    figures["journal MB"] = sum(size for path, size in sizes.items() if path.name.startswith("journal.sqlite")) / 1e6
    figures["journal -wal MB"] = size_of(run.path / "journal.sqlite-wal") / 1e6
    figures["metrics.jsonl MB"] = size_of(run.path / "metrics.jsonl") / 1e6
    return figures | run.newest_metrics(*LAG)


def size_of(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def slope_of(rows: list[Row], name: str, warm_up: int) -> Slope | None:
    """Return one slope for all pieces, each with a level of its own; None with fewer than 3 rows in every piece."""
    pieces: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for piece in {row.piece for row in rows}:
        warm = min(row.step for row in rows if row.piece == piece) + warm_up
        for row in rows:
            if row.piece == piece and row.step >= warm and name in row.figures:
                pieces[piece].append((row.step / 1000, row.figures[name]))
    pairs = [pair for piece in sorted(pieces) for pair in pieces[piece]]
    centred = [
        (x - fmean(x for x, _ in piece), y - fmean(y for _, y in piece)) for piece in pieces.values() for x, y in piece
    ]
    spread, free = sum(x * x for x, _ in centred), len(centred) - len(pieces) - 1
    if free < 1 or spread == 0:
        return None
    slope = sum(x * y for x, y in centred) / spread
    error = math.sqrt(sum((y - slope * x) ** 2 for x, y in centred) / free / spread)
    return Slope(first=pairs[0][1], last=pairs[-1][1], per_1000=slope, error=error)


def show(slopes: dict[str, Slope | None]) -> None:
    print(f"{'':24}{'first':>12}{'last':>12}{'per 1,000':>12}{'+-':>10}")
    for name, slope in slopes.items():
        if slope is not None:
            figures = f"{slope.first:12.3f}{slope.last:12.3f}{slope.per_1000:12.3f}{slope.error:10.3f}"
            print(f"{name:24}{figures}  {slope.verdict}")


def write(rows: list[Row], path: Path) -> None:
    names = sorted({name for row in rows for name in row.figures})
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["piece", "step", "at_s", *names])
        table.writerows(
            [row.piece, row.step, round(row.at_s, 1), *(row.figures.get(n, "") for n in names)] for row in rows
        )


if __name__ == "__main__":
    sys.exit(main())
