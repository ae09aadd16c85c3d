"""What it costs to journal a trajectory: microseconds and bytes, JSON (schema 1) and packed (schema 2) side by side.

    python benchmarks/journal_cost.py [--rounds 3] [--folder FOLDER] [--out FILE]

Answers of 16, 256 and 4096 tokens (prompts of 32), 1, 16 and 256 of them per transaction, each journal on its own;
`encode` is the share before SQLite, `read` is a row back to a trajectory. The two forms take turns, the median of the
rounds is printed. Last: how long one call of the compaction holds its caller up, and what it leaves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from measuring import journal_v1
from measuring.curve import table

from areal.contracts.messages import Completion, Outcome, Trajectory
from areal.flow.buffer.codec import decode_trajectory, encode_trajectory
from areal.flow.buffer.journal import Issued, Journal

LENGTHS, BATCHES, PROMPT = (16, 256, 4096), (1, 16, 256), 32
TOKENS_A_CELL = 1_000_000
"""Tokens written in each measurement, within the bounds on the number of trajectories below."""
FEWEST, MOST = 256, 4096
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cell")
    parser.add_argument("--folder", type=Path, help="where the journals are written; else the temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
    rows: dict[str, dict[str, object]] = {}
    for length in LENGTHS:
        made = trajectories(length)
        for batch in BATCHES:
            rows[f"{length} tokens, {batch} a transaction"] = cell(made, batch, args)
        print(f"measured {len(made)} answers of {length} tokens", flush=True)
    figures_first = {figure: {name: row[figure] for name, row in rows.items()} for figure in next(iter(rows.values()))}
    print(table(figures_first))
    print()
    compacted = compaction(args.folder)
    print(table({"compaction": compacted}))
    if args.out:
        args.out.write_text(json.dumps({"cost": rows, "compaction": compacted}, indent=2) + "\n", encoding="utf-8")


def trajectories(length: int) -> list[Trajectory]:
    """Return answers such as an engine gives: single-precision logprobs, one change of the weights on the way."""
    rng = random.Random(length)
    made: list[Trajectory] = []
    for i in range(min(MOST, max(FEWEST, TOKENS_A_CELL // length))):
        change = rng.randrange(length)
        turn = Completion(
            uid=f"{i // GROUP}/{i % GROUP}/0",
            prompt_ids=tuple(rng.randrange(49152) for _ in range(PROMPT)),
            token_ids=tuple(rng.randrange(49152) for _ in range(length)),
            logprobs=tuple(single(-rng.expovariate(2.0)) for _ in range(length)),
            versions=(3,) * change + (4,) * (length - change),
            finish_reason="stop",
        )
        made.append(Trajectory(group=i // GROUP, sample=i % GROUP, turns=(turn,), outcome=Outcome.scored(0.5)))
    return made


def single(number: float) -> float:
    """Return a number that single precision holds: 24 bits of mantissa."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**24), exponent - 24)


def cell(made: Sequence[Trajectory], batch: int, args: argparse.Namespace) -> dict[str, object]:
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, measure in (("json", measure_v1), ("packed", measure_now)):
            with temporary(args.folder) as folder:
                for figure, value in measure(made, batch, Path(folder) / "journal.sqlite").items():
                    found.setdefault(f"{name} {figure}", []).append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {name: round(value, 1) for name, value in medians.items()} | {
        "time, times less": round(medians["json us"] / medians["packed us"], 1),
        "bytes, times less": round(medians["json bytes"] / medians["packed bytes"], 1),
    }


def temporary(folder: Path | None) -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="areal-journal-", dir=folder)


def measure_v1(made: Sequence[Trajectory], batch: int, path: Path) -> dict[str, float]:
    db = journal_v1.open_v1(path)
    db.execute("BEGIN")
    for number in range(math.ceil(len(made) / GROUP)):
        journal_v1.issue(db, number, GROUP)
    db.execute("COMMIT")
    encoding = seconds(lambda: [journal_v1.encode(t) for t in made])
    writing = seconds(lambda: [journal_v1.finish(db, made[i : i + batch]) for i in range(0, len(made), batch)])
    texts = [(t.group, t.sample, journal_v1.encode(t)) for t in made]
    reading = seconds(lambda: [decode_trajectory(group, sample, text, None) for group, sample, text in texts])
    db.close()
    return figures(made, encoding, writing, reading, path)


def measure_now(made: Sequence[Trajectory], batch: int, path: Path) -> dict[str, float]:
    journal = Journal(path, create=True)
    journal.issued(issued(math.ceil(len(made) / GROUP)))
    encoding = seconds(lambda: [encode_trajectory(t) for t in made])
    writing = seconds(lambda: [journal.finished((), made[i : i + batch]) for i in range(0, len(made), batch)])
    rows = [(t.group, t.sample, *encode_trajectory(t)) for t in made]
    reading = seconds(lambda: [decode_trajectory(*row) for row in rows])
    journal.close()
    return figures(made, encoding, writing, reading, path)


def issued(num_groups: int) -> list[Issued]:
    return [
        Issued(number=n, environment="digits", prompt_index=n, num_samples=GROUP, issued_version=0)
        for n in range(num_groups)
    ]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def figures(
    made: Sequence[Trajectory], encoding: float, writing: float, reading: float, path: Path
) -> dict[str, float]:
    """Return what one trajectory costs; the file is closed, so it holds everything."""
    us = 1e6 / len(made)
    return {
        "us": writing * us,
        "encode us": encoding * us,
        "read us": reading * us,
        "bytes": path.stat().st_size / len(made),
    }


def compaction(folder: Path | None) -> dict[str, object]:
    """Journal 8 steps of 256 answers of 4096 tokens, then take the tokens out call by call."""
    made = trajectories(4096)[: 32 * GROUP]
    with temporary(folder) as name:
        path = Path(name) / "journal.sqlite"
        journal = Journal(path, create=True)
        copies = 8
        journal.issued(issued(32 * copies))
        for copy in range(copies):
            journal.finished((), [moved(t, 32 * copy) for t in made])
            journal.dropped(range(32 * copy, 32 * (copy + 1)), step=copy + 1)
        before = path.stat().st_size + path.with_name(f"{path.name}-wal").stat().st_size
        calls: list[float] = []
        more = True
        while more:
            began = time.perf_counter()
            more = journal.compact(copies, 2**20)
            calls.append(time.perf_counter() - began)
        after = path.stat().st_size
        wal = path.with_name(f"{path.name}-wal").stat().st_size
        journal.close()
    return {
        "MB before": round(before / 2**20, 1),
        "MB after": round(after / 2**20, 1),
        "MB of -wal after": round(wal / 2**20, 1),
        "calls": len(calls),
        "median ms": round(statistics.median(calls) * 1e3, 1),
        "longest ms": round(max(calls) * 1e3, 1),
    }


def moved(trajectory: Trajectory, by: int) -> Trajectory:
    return Trajectory(
        group=trajectory.group + by, sample=trajectory.sample, turns=trajectory.turns, outcome=trajectory.outcome
    )


if __name__ == "__main__":
    main()
