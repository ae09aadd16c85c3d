"""How busy the engines are: asynchronous against synchronous, simulated engines under the real controller.

    python benchmarks/utilisation.py [--engines 64] [--minutes 15] [--only NAME,...] [--out FILE]

The model is fixed before anything is run (docs/simulation.md says where its numbers come from): engines like a
7-billion-parameter model on one H100, answers of 200 to 2,000 tokens (10 times, uniform on a logarithmic scale),
prompts of 200. The trainer is a little faster than the engines: a step with its transfer takes TRAINER_SHARE of the
time that all engines need, at their best batch size, for the answers of a step.

    busy share    of the engines' time in which they had at least one running request
    working share the same without pauses, in which requests stand still while weights are swapped
    token share   tokens made, by those that the same engines would make if they decoded all the time at their best
                  batch size

Time is virtual and leaves the first quarter of the run out; an engine that is dead, starting or without weights counts
as idle. A token that a dying engine takes along was made, and is made again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring.areal_side import newest_run, step_lines
from measuring.processes import areal_command, new_folder, run_process

STEP_S, STEP_S_PER_REQUEST, PREFILL_S, MAX_RUNNING = 0.010, 0.0001, 0.000035, 64
SHORTEST, SPREAD, PROMPT = 200, 10.0, 200
GROUPS, GROUP_SIZE = 256, 8
TRANSFER_S, SWAP_S, START_S, UPDATE_S = 1.0, 0.2, 60.0, 0.5
TRAINER_SHARE = 0.9
WARM_SHARE = 0.25

SCENARIOS: dict[str, dict[str, Any]] = {
    "synchronous": {"max": 0},
    "asynchronous, 2": {"max": 2},
    "asynchronous, 4": {"max": 4},
    "asynchronous, 4, finished": {"max": 4, "order": "finished"},
    "asynchronous, 4, deaths": {"max": 4},
}
"""`staleness` of the recipe by name."""
DEATHS_PER_HOUR = {"asynchronous, 4, deaths": 0.1}


@dataclass(frozen=True)
class Result:
    name: str
    busy_share: float
    working_share: float
    token_share: float
    steps: int
    step_s: float
    """Virtual seconds a step, mean of the window."""
    window_s: float
    num_engines_seen: int
    dropped_groups: float
    staleness_mean: float
    real_s: float


def best_rate() -> float:
    """Return the tokens a second of one engine that always decodes a full batch."""
    return MAX_RUNNING / (STEP_S + STEP_S_PER_REQUEST * MAX_RUNNING)


def mean_answer() -> float:
    """Return the mean of a logarithmically uniform length."""
    return SHORTEST * (SPREAD - 1) / math.log(SPREAD)


def generation_s(engines: int) -> float:
    """Return the seconds that all engines need for the answers of one step."""
    return GROUPS * GROUP_SIZE * mean_answer() / (engines * best_rate())


def recipe(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    step_s = generation_s(args.engines)
    train_s = TRAINER_SHARE * step_s - TRANSFER_S - UPDATE_S
    tokens = GROUPS * GROUP_SIZE * (mean_answer() + PROMPT)
    if train_s <= 0:
        raise SystemExit(f"{args.engines} engines make a step in {step_s:.1f} s, less than a transfer; use fewer")
    return {
        "name": "utilisation",
        "device": "cpu",
        "cluster": {"name": "sim", "engine_deaths_per_hour": DEATHS_PER_HOUR.get(name, 0.0)},
        "engine": {
            "name": "sim", "replicas": args.engines, "step_s": STEP_S, "step_s_per_request": STEP_S_PER_REQUEST,
            "prefill_s_per_token": PREFILL_S, "max_running": MAX_RUNNING, "start_s": START_S, "swap_s": SWAP_S,
            "record": str(folder / "engines.jsonl"),
        },
        "backend": {"name": "sim", "step_s": UPDATE_S, "s_per_token": train_s / tokens},
        "reshard": {"name": "sim", "transfer_s": TRANSFER_S},
        "environments": [
            {"name": "sim", "type": "sim", "prompt_chars": PROMPT, "shortest": SHORTEST, "spread": SPREAD}
        ],
        "training": {"batch_size": GROUPS, "max_steps": max(8, round(60 * args.minutes / step_s))},
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE},
        "sampling": {"max_new_tokens": 4096},
        "staleness": SCENARIOS[name],
        "rollout": {"episode_timeout_s": 3600.0},
        "checkpoint": {"every_steps": 0},
        "trackers": ["jsonl"],
    }  # fmt: skip


def measure(name: str, args: argparse.Namespace, folder: Path) -> Result:
    folder.mkdir(parents=True)
    asked = recipe(name, args, folder)
    (folder / "recipe.yaml").write_text(json.dumps(asked), encoding="utf-8")
    command = [*areal_command(), "run", str(folder / "recipe.yaml"), f"runs_dir={folder / 'runs'}"]
    began = time.time()
    run_process(command, log=folder / "log", cores=args.cores, environment={}, deadline_s=args.deadline_s)
    run = newest_run(folder)
    steps = step_lines(run)
    (run / "journal.sqlite").unlink()
    lines = [json.loads(line) for line in (folder / "engines.jsonl").read_text(encoding="utf-8").splitlines()]
    moments = sorted({line["time"] for line in lines})
    first, last = moments[round(WARM_SHARE * len(moments))], moments[-1]
    worked_s, stood_s, tokens, seen = totals(lines, first, last)
    capacity_s = args.engines * (last - first)
    return Result(
        name=name,
        busy_share=(worked_s + stood_s) / capacity_s,
        working_share=worked_s / capacity_s,
        token_share=tokens / (capacity_s * best_rate()),
        steps=len(steps),
        step_s=(last - first) / (len(moments) - 1 - round(WARM_SHARE * len(moments))),
        window_s=last - first,
        num_engines_seen=seen,
        dropped_groups=steps[-1]["staleness/dropped_groups"],
        staleness_mean=sum(step["staleness/mean"] for step in steps) / len(steps),
        real_s=time.time() - began,
    )


def totals(lines: list[dict[str, Any]], first: float, last: float) -> tuple[float, float, float, int]:
    """Return seconds at work, seconds in pauses and tokens of all engines between two moments, and their number."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["began"] <= line["time"] and first <= line["time"] <= last:
            by_name[line["name"]].append(line)
    figures = ("worked_s", "stood_s", "tokens")
    nothing = dict.fromkeys(figures, 0)
    pairs = [(nothing if seen[0]["began"] > first else seen[0], seen[-1]) for seen in by_name.values()]
    worked_s, stood_s, tokens = (sum(end[figure] - start[figure] for start, end in pairs) for figure in figures)
    return worked_s, stood_s, tokens, len(by_name)


def main() -> None:
    args = arguments()
    folder = new_folder(args.folder, "utilisation")
    step_s = generation_s(args.engines)
    print(
        f"{args.engines} engines, {STEP_S * 1e3:g} ms + {STEP_S_PER_REQUEST * 1e3:g} ms a request for a decode step, "
        f"at most {MAX_RUNNING} requests: at best {best_rate():.0f} tokens a second each\n"
        f"steps of {GROUPS} prompts x {GROUP_SIZE} answers of {SHORTEST} to {SHORTEST * SPREAD:.0f} tokens (mean "
        f"{mean_answer():.0f}): {step_s:.1f} s for the engines, {TRAINER_SHARE * step_s:.1f} s for trainer and "
        f"transfer; the longest answer alone takes {SHORTEST * SPREAD * MAX_RUNNING / best_rate():.0f} s\n"
        f"{'':>26} {'busy':>6} {'working':>8} {'tokens':>7} {'s a step':>9} {'window':>8} {'engines':>8} "
        f"{'dropped':>8} {'age':>5}"
    )
    results: list[Result] = []
    for number, name in enumerate(args.only):
        result = measure(name, args, folder / str(number))
        results.append(result)
        print(
            f"{name:>26} {result.busy_share:>6.1%} {result.working_share:>8.1%} {result.token_share:>7.1%} "
            f"{result.step_s:>9.2f} {result.window_s:>6.0f} s {result.num_engines_seen:>8} "
            f"{result.dropped_groups:>8.0f} {result.staleness_mean:>5.2f}",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64, help="replicas")
    parser.add_argument("--minutes", type=float, default=15.0, help="virtual minutes of a run at the engines' best")
    parser.add_argument("--only", type=names, default=list(SCENARIOS), help="scenarios, with semicolons")
    parser.add_argument("--cores", type=int, default=2, help="cores the run may use; it is one process")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="longest real time for one run")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--folder", type=Path, help="where the runs' folders are made")
    return parser.parse_args()


def names(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(";")]
    if unknown := [name for name in chosen if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no scenario; there are: {'; '.join(SCENARIOS)}")
    return chosen


if __name__ == "__main__":
    main()
