"""AReaL against TRL 1.16: seconds per step and seconds to the same reward, both sides in one run.

    python benchmarks/vs_trl.py [--case a|b|c|all] [--steps N] [--rounds N] [--out FILE]

Sides, one after the other in each round, on the same cores: AReaL as `areal run` starts it (rollout and training
overlap, staleness at most 2), TRL's GRPOTrainer, and for information AReaL with staleness 0. What is the same and
what is not: benchmarks/README.md. The first call makes an environment for TRL in .venvs/trl (about 1.5 GB).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring.areal_side import issued_prompts, run_areal
from measuring.cases import CASES, Case, initial_model
from measuring.curve import Curve, median_of, show, table
from measuring.processes import new_folder
from measuring.trl_environment import add_trl_arguments, trl_python
from measuring.trl_side import run_trl

GOALS = {"a": 1.3, "b": 1.6, "c": 3.0}
"""How many times as fast as TRL we want to be, per step and to the same reward."""
OURS, OURS_SYNC, TRL = "AReaL", "AReaL, staleness 0", "TRL"
COMPARED = ("median_step_s", "mean_step_s", "to_bar_s", "to_bar_from_command_s")


def main() -> None:
    args = arguments()
    python = trl_python(args.trl_python)
    folder = new_folder(args.folder, "vs_trl")
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(args).items()}, "cases": {}}
    for name in CASES if args.case == "all" else [args.case]:
        report["cases"][name] = compare(name, CASES[name].with_precision(args.precision), args, python, folder / name)
        if args.out:
            args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nlogs, recipes and curves: {folder}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--steps", type=int, help="training steps; else the case's own")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side runs")
    parser.add_argument(
        "--cores", type=int, default=2, help="cores for each side: all TRL's, or shared by our processes"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "float32"],
        default="auto",
        help="of SmolLM2 on every side; auto: bf16 where the processor has it",
    )
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct; else: areal models pull smollm2")
    add_trl_arguments(parser)
    parser.add_argument("--no-sync", action="store_true", help="leave out our synchronous side")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="longest time for one side's run")
    parser.add_argument("--folder", type=Path, help="where everything is written; else below runs/benchmarks")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def compare(name: str, case: Case, args: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Run all sides of one case, print what came out and return it."""
    steps = args.steps or case.steps
    print(
        f"\n({name}) {case.title}, {steps} steps, {case.precision}; load average {os.getloadavg()[0]:.2f}", flush=True
    )
    model = initial_model(case, args.smollm2, folder=folder, seed=args.seed, cores=args.cores)
    curves: dict[str, list[Curve]] = {}
    for number in range(args.rounds):
        for curve in one_round(case, args, model, steps, python, folder / f"round-{number + 1}"):
            figures = curve.summary(case.bar, case.window)
            print(f"  {curve.label}: {show(figures['median_step_s'])} s a step", flush=True)
            curves.setdefault(curve.label, []).append(curve)
    return outcome(name, case, curves)


def one_round(
    case: Case, args: argparse.Namespace, model: str, steps: int, python: str, folder: Path
) -> Iterator[Curve]:
    """Yield the curve of each side; TRL gets the prompts that our side was given, in their order."""
    recipe = case.recipe(model, args.seed, steps)
    shared = {"cores": args.cores, "deadline_s": args.deadline_s}
    curve, run = run_areal(OURS, recipe, [], folder=folder / "areal", **shared)
    yield curve
    prompts = issued_prompts(run)[: steps * case.batch_size]
    job = case.trl_job(model, args.seed, steps)
    yield run_trl(job, prompts, python=python, folder=folder / "trl", wait_policy=args.trl_wait_policy, **shared)
    if not args.no_sync:
        arguments = ["staleness.max=0"]
        yield run_areal(OURS_SYNC, recipe, arguments, folder=folder / "areal-staleness-0", **shared)[0]


def outcome(name: str, case: Case, curves: dict[str, list[Curve]]) -> dict[str, Any]:
    """Print and return the figures of each side, the median over the rounds, and TRL's times divided by ours."""
    sides = {
        label: median_of([curve.summary(case.bar, case.window) for curve in runs]) for label, runs in curves.items()
    }
    print(f"\n({name}) bar: mean reward of {case.window} steps at least {case.bar}")
    print(table(sides))
    ratios = {
        figure: {label: ratio(sides[TRL][figure], sides[label][figure]) for label in sides if label != TRL}
        for figure in COMPARED
    }
    print(f"\nTRL's time divided by ours; the goal is {GOALS[name]}")
    for figure, by_label in ratios.items():
        print(f"  {figure:24}" + "".join(f"  {label}: {show(value)}" for label, value in by_label.items()))
    return {"title": case.title, "goal": GOALS[name], "sides": sides, "ratios": ratios, "curves": saved(curves)}


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def saved(curves: dict[str, list[Curve]]) -> dict[str, Any]:
    """Return all curves as plain values, times from the command's start."""
    return {
        label: [{"times": [time - run.started for time in run.times], "rewards": list(run.rewards)} for run in runs]
        for label, runs in curves.items()
    }


if __name__ == "__main__":
    main()
