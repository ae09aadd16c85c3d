"""Asynchronous against synchronous AReaL on the same cores: where overlapping pays, and where it loses.

    python benchmarks/async_vs_sync.py [--case uniform|spread|both] [--steps N] [--rounds N] [--out FILE]
    python benchmarks/async_vs_sync.py --engine vllm [--case arithmetic|spread|uniform|both] [--out FILE]

- asynchronous: rollout and training overlap, staleness at most 2, each process with its share of the cores;
- synchronous: the same processes with staleness 0, so that one of them always waits;
- synchronous, all cores: staleness 0 in one process (cluster inline) that computes with every core.

uniform is the tiny task with answers of 5 tokens, spread is SmolLM2 with short and long answers in each batch
(benchmarks/README.md). "Wait" is the trainer's share of time without work: the rest is what overlapping can gain.
With --engine vllm all three generate with vLLM, in its environment .venvs/vllm, and arithmetic is the SmolLM2 recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring.areal_side import run_areal
from measuring.cases import ARITHMETIC, CASES, Case, initial_model
from measuring.curve import Curve, median_of, table
from measuring.processes import new_folder
from measuring.vllm_environment import add_vllm_options, vllm_options, vllm_python

KINDS = {"uniform": replace(CASES["a"], window=10), "spread": CASES["c"], "arithmetic": ARITHMETIC}
BOTH = {"transformers": ("uniform", "spread"), "vllm": ("arithmetic", "spread")}
"""The two cases of each engine."""
ASYNC, SYNC, SYNC_ALL = "asynchronous", "synchronous", "synchronous, all cores"
FIGURES = {
    "mean_step_s": "seconds a step",
    "to_last_step_s": "seconds to the last step",
    "to_bar_s": "seconds to the reward",
}
TIE = 0.03
"""Differences below this share are noise even on a quiet machine."""


def main() -> None:
    args = arguments()
    folder = new_folder(args.folder, "async_vs_sync")
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(args).items()}, "cases": {}}
    args.python = vllm_python(args.vllm_python) if args.engine == "vllm" else sys.executable
    for name in BOTH[args.engine] if args.case == "both" else [args.case]:
        report["cases"][name] = compare(name, KINDS[name].with_precision(args.precision), args, folder / name)
        if args.out:
            args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nlogs, recipes and curves: {folder}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*KINDS, "both"], default="both")
    parser.add_argument(
        "--engine", choices=list(BOTH), default="transformers", help="what generates, in all three ways"
    )
    add_vllm_options(parser, max_num_seqs=64, kv_cache_mb=512)
    parser.add_argument("--steps", type=int, help="training steps; else the case's own")
    parser.add_argument("--rounds", type=int, default=1, help="how often each way runs")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "float32"],
        default="auto",
        help="of SmolLM2 on every side; auto: bf16 where the processor has it",
    )
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct; else: areal models pull smollm2")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="longest time for one run")
    parser.add_argument("--folder", type=Path, help="where everything is written; else below runs/benchmarks")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def compare(name: str, case: Case, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one case in all three ways, print what came out and return it."""
    steps = args.steps or case.steps
    print(f"\n{name}: {case.title}, {steps} steps, {case.precision}", flush=True)
    model = initial_model(case, args.smollm2, folder=folder, seed=args.seed, cores=args.cores)
    summaries: dict[str, list[dict[str, float | None]]] = {}
    engine = {"name": args.engine, **(vllm_options(args) if args.engine == "vllm" else {})}
    recipe = {**case.recipe(model, args.seed, steps), "engine": engine}
    for number in range(args.rounds):
        for curve in one_round(recipe, args, folder / f"round-{number + 1}"):
            summaries.setdefault(curve.label, []).append(curve.summary(case.bar, case.window))
    sides = {label: median_of(rounds) for label, rounds in summaries.items()}
    print(f"\n{name}: the reward to reach is {case.bar}, mean of {case.window} steps")
    print(table(sides))
    for figure, words in FIGURES.items():
        for rival in (SYNC, SYNC_ALL):
            print(f"  {verdict(words, sides[ASYNC][figure], rival, sides[rival][figure])}")
    return {"title": case.title, "sides": sides}


def one_round(recipe: dict[str, Any], args: argparse.Namespace, folder: Path) -> Iterator[Curve]:
    threads = {"OMP_NUM_THREADS": str(args.cores)}
    if args.engine == "vllm":
        threads["OMP_WAIT_POLICY"] = "PASSIVE"  # as every worker process has it
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        ASYNC: (["staleness.max=2"], {}),
        SYNC: (["staleness.max=0"], {}),
        SYNC_ALL: (["staleness.max=0", "--cluster", "inline"], threads),
    }
    for number, (label, (options, environment)) in enumerate(ways.items()):
        yield run_areal(
            label,
            recipe,
            options,
            folder=folder / str(number),
            cores=args.cores,
            deadline_s=args.deadline_s,
            environment=environment,
            python=args.python,
        )[0]


def verdict(words: str, ours: float | None, rival: str, theirs: float | None) -> str:
    """Return one sentence that says who was ahead and by how much."""
    if ours is None or theirs is None:
        missing = " and ".join(label for label, value in ((ASYNC, ours), (rival, theirs)) if value is None)
        return f"{words}: no verdict against {rival!r}, not reached by {missing}"
    if abs(theirs / ours - 1) < TIE:
        return f"{words}: asynchronous and {rival!r} are equal ({ours:.2f} and {theirs:.2f})"
    word = "WINS" if ours < theirs else "LOSES"
    return (
        f"{words}: asynchronous {word} against {rival!r}, {theirs / ours:.2f} times as fast ({ours:.2f}, {theirs:.2f})"
    )


if __name__ == "__main__":
    main()
