"""How the default run learns: `areal run seed=N` for several seeds, with wall-clock times from the command's start.

    python benchmarks/seeds.py [--seeds 5] [--first 1] [--out FILE] [KEY.SUB=VALUE ...]

For each seed: mean reward of the first 10 steps, seconds to the first step, seconds to a mean reward of 10 steps of
at least 0.95, mean reward of 10 steps 120 s after the start, and of the last 10 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from measuring.areal_side import run_areal
from measuring.curve import Curve, show, table

BAR, WINDOW, LOOK_AT_S = 0.95, 10, 120.0
FIRST_MOST = 0.3
"""A run that starts above this had little left to learn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--cores", type=int, default=2, help="cores the run may use")
    parser.add_argument("--deadline-s", type=float, default=1200.0, help="longest time for one run")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("override", nargs="*", metavar="KEY.SUB=VALUE", help="changes to the default recipe")
    args = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    for seed in range(args.first, args.first + args.seeds):
        rows[f"seed {seed}"] = row = one_seed(seed, args)
        print("  " + ", ".join(f"{name} {show(value)}" for name, value in row.items()), flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(table(rows))
    good = sum(bool(row["reached in time"]) for row in rows.values())
    print(f"\n{good} of {len(rows)} seeds rose from below {FIRST_MOST} to {BAR} within {LOOK_AT_S:g} s of the command")


def one_seed(seed: int, args: argparse.Namespace) -> dict[str, object]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="areal-seeds-") as folder:
        curve, _ = run_areal(
            f"seed {seed}",
            None,
            [f"seed={seed}", *args.override],
            folder=Path(folder),
            cores=args.cores,
            deadline_s=args.deadline_s,
        )
    return figures(curve) | {"load before": load}


def figures(curve: Curve) -> dict[str, object]:
    """Return what is printed of one seed; seconds count from the command's start."""
    reached = curve.reached_at(BAR, WINDOW)
    first = sum(curve.rewards[:WINDOW]) / len(curve.rewards[:WINDOW])
    reached_s = None if reached is None else reached - curve.started
    return {
        "reward, first 10 steps": first,
        "s to first step": curve.times[0] - curve.started,
        f"s to {BAR}": reached_s,
        f"reward at {LOOK_AT_S:g} s": curve.reward_at(curve.started + LOOK_AT_S, WINDOW),
        "reward, last 10 steps": curve.running_rewards(WINDOW)[-1],
        "s a step": curve.mean_step_s(),
        "s to last step": curve.times[-1] - curve.started,
        "s to the command's end": curve.ended - curve.started,
        "reached in time": int(first < FIRST_MOST and reached_s is not None and reached_s <= LOOK_AT_S),
    }


if __name__ == "__main__":
    main()
