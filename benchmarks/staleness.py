"""How much staleness each objective bears: the bundled task with rising bounds, naive ratio against decoupled.

    python benchmarks/staleness.py --out FILE.json [--staleness 0,1,2,4,8,16] [--objectives naive,decoupled]
        [--seeds 3] [--steps N] [--minibatches 4] [--learning-rate 1.5e-4]
        [--resume] [--most-runs N] [--table FILE.md] [--plot FILE.png]
        [KEY.SUB=VALUE ...]

Each run is `areal run` with the bundled recipe and a few values changed; the same seed has the same prompts and the
same weights at the start, after the recipe's supervised warm-up. A bound says nothing by itself: how old the samples
really were is measured and stands beside it. Runs that end badly are outcomes. After every run the JSON file is
written; with --resume runs that are in it are not made again, and --most-runs 0 only makes table and plot from it.
What the figures mean: docs/staleness.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring.curve import show
from measuring.processes import areal_command, new_folder
from measuring.stale_report import conclusions, write_plot, write_table
from measuring.stale_run import OWN, Cell, Outcome, measure, settings

OBJECTIVES = ("naive", "decoupled")
SHOWN = ("reward_last", "reward_evaluated", "steps_to_bar", "to_bar_s", "step_s", "age_mean", "age_max", "behavior_kl")
DRY_RUN_S = 120.0


def main() -> None:
    args = arguments()
    asked = {
        "steps": args.steps,
        "minibatches": args.minibatches,
        "learning_rate": args.learning_rate,
        "cores": args.cores,
        "overrides": sorted(args.override),
    }
    outcomes = known_outcomes(args.out, asked, resume=args.resume)
    folder = new_folder(args.folder, "staleness")
    done = {outcome.cell for outcome in outcomes}
    left = [cell for cell in cells(args) if cell not in done]
    print(f"{len(done)} runs are there, {len(left)} are not; at most {args.most_runs} now", flush=True)
    check(left, args)
    for number, cell in enumerate(left[: args.most_runs], start=1):
        print(f"\n{number}. {cell.label}", flush=True)
        outcomes.append(one(cell, args, folder / f"{cell.objective}-{cell.bound}-{cell.seed}"))
        saved = {"settings": asked, "runs": [asdict(outcome) for outcome in outcomes]}
        args.out.write_text(json.dumps(saved, separators=(",", ":")) + "\n", encoding="utf-8")
    if not outcomes:
        return
    if args.plot:
        write_plot(outcomes, args.plot)
    if args.table:
        write_table(outcomes, asked, args.table, args.plot)
    print("\n" + "\n".join(conclusions(outcomes)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=bounds, default=[0, 1, 2, 4, 8, 16], help="bounds, with commas")
    parser.add_argument("--objectives", type=objectives, default=list(OBJECTIVES), help="naive, decoupled, or both")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--steps", type=int, default=350, help="training steps of each run")
    parser.add_argument("--minibatches", type=int, default=4, help="updates a step; with 1 there is no inner ratio")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=1.5e-4,
        help="of each update; the recipe's 6e-4, shared by 4 mini-batches",
    )
    parser.add_argument("--cores", type=int, default=2, help="cores each run may use")
    parser.add_argument("--deadline-s", type=float, default=1200.0, help="longest time for one run")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all runs, written after each")
    parser.add_argument("--resume", action="store_true", help="go on with the runs that are not yet in --out")
    parser.add_argument("--most-runs", type=int, default=1000, help="runs to make before it stops")
    parser.add_argument("--folder", type=Path, help="logs and recipes; else below runs/benchmarks")
    parser.add_argument("--table", type=Path, help="Markdown file; a page with the marks keeps what is around them")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("override", nargs="*", metavar="KEY.SUB=VALUE", help="changes to the default recipe")
    args = parser.parse_args()
    if own := [text for text in args.override if text.partition("=")[0] in OWN]:
        parser.error(f"the experiment itself sets {', '.join(own)}; see the options")
    return args


def bounds(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def objectives(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in OBJECTIVES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(OBJECTIVES)}")
    return chosen


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return all runs, a whole seed after the other, so that a part of them is already an answer."""
    seeds = range(args.first, args.first + args.seeds)
    return [Cell(objective, bound, seed) for seed in seeds for bound in args.staleness for objective in args.objectives]


def known_outcomes(out: Path, asked: dict[str, Any], *, resume: bool) -> list[Outcome]:
    """Return what earlier calls measured; SystemExit when that was another experiment."""
    if not out.exists():
        return []
    if not resume:
        raise SystemExit(f"{out} is there already; go on with it with --resume, or name another file")
    saved = json.loads(out.read_text(encoding="utf-8"))
    if saved["settings"] != asked:
        raise SystemExit(f"{out} was measured with {saved['settings']}, and this would be {asked}")
    return [Outcome(**run) for run in saved["runs"]]


def check(left: list[Cell], args: argparse.Namespace) -> None:
    """End here if the recipe is refused or the cores are missing: that would not be an outcome of any run."""
    if not left or not args.most_runs:
        return
    if len(os.sched_getaffinity(0)) < args.cores:
        raise SystemExit(f"this machine has fewer than {args.cores} cores for us; use --cores")
    tried = subprocess.run(
        [*areal_command(), "run", "--dry-run", *changes(left[0], args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DRY_RUN_S,
    )
    if tried.returncode:
        raise SystemExit(f"`areal run` refuses the recipe:\n{tried.stderr or tried.stdout}")


def changes(cell: Cell, args: argparse.Namespace) -> list[str]:
    """Return what the run changes in the bundled recipe; the experiment's own values come last."""
    own = settings(cell, steps=args.steps, minibatches=args.minibatches, learning_rate=args.learning_rate)
    return [*args.override, *own]


def one(cell: Cell, args: argparse.Namespace, folder: Path) -> Outcome:
    outcome = measure(
        cell,
        changes(cell, args),
        folder=folder,
        cores=args.cores,
        deadline_s=args.deadline_s,
        load=os.getloadavg()[0],
    )
    told = ", ".join(f"{name} {show(outcome.figures.get(name))}" for name in SHOWN)
    print(f"  {outcome.ended}{': ' if outcome.reason else ''}{outcome.reason}; {told}", flush=True)
    return outcome


if __name__ == "__main__":
    main()
