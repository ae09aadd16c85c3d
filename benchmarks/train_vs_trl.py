"""The update alone, AReaL's training backends against TRL 1.16: seconds a step on 1 and on 2 processes, in one run.

    python benchmarks/train_vs_trl.py [--size 135M] [--cases uniform,spread,shared] [--rounds 3] [--out FILE]

Every side makes optimizer steps on the same rollouts, which are there before a step begins: the backends `fsdp2` and
`torch` by `train_step`, TRL's GRPOTrainer with a `rollout_func` that hands the rollouts over. One process has all
cores, two have half of them each: data parallelism, fsdp2's sharded, TRL's as DistributedDataParallel. The sides of as
many processes live at the same time and take turns. First, on a tiny model in float32, all of them make the same steps
and the script ends if what came out is not the same update. What is the same and what is not: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring.cases import has_bf16
from measuring.processes import new_folder
from measuring.step_batches import CASES, num_tokens, padded_tokens, write
from measuring.step_models import write_model
from measuring.step_sides import COPIES, SIDES, TRL, Running, Side, Work, moved_apart
from measuring.sync_models import SIZES
from measuring.trl_environment import add_trl_arguments, trl_python

CHECK_STEPS = 3
CHECK = {"size": "tiny", "groups": 4, "group_size": 4, "tokens": 48, "micro_batch_tokens": 256, "learning_rate": 1e-3}
LEARNING_RATE = 1e-6
GROSS = {"loss": 1e-3, "grad_norm": 1e-3, "weights": 0.05}
"""How far a side may be from TRL in the check: absolutely, relatively, and as a share of the way the weights went.

AdamW's first steps are as long for a gradient that is nothing but rounding as for any other, hence the last."""
GROSS_BF16 = 0.05
"""How far the gradient norms of the measured model's first step may be apart in bf16; in float32 `GROSS` holds."""

Batches = dict[str, list[dict[str, Any]]]


def check(args: argparse.Namespace, sides: Sequence[Side], folder: Path) -> dict[str, Any]:
    """Make a few steps of a tiny model on every side, print and return how far they are from the first; SystemExit."""
    batches = batches_of(["spread"], CHECK["size"], CHECK["groups"], CHECK["group_size"], CHECK["tokens"], args.seed)
    names = ("learning_rate", "micro_batch_tokens", "groups", "group_size")
    with model_of(CHECK["size"], folder, args.seed) as model:
        work = work_of(model, batches, folder, bf16=False, seed=args.seed, **{name: CHECK[name] for name in names})
        with running(sides, work, args, folder) as started:
            found = {side.side.name: steps_of(side, folder, args.deadline_s) for side in started}
        apart = moved_apart(model, [one["folder"] for one in found.values()])
    for name, distance in zip(found, apart, strict=True):
        found[name] |= {"weights": distance, **{key: apart_from(found, name, key) for key in ("loss", "grad_norm")}}
    print(f"\nthe same update? {CHECK_STEPS} steps of a tiny model, float32; how far from {sides[0].name}:")
    for name, one in found.items():
        print(f"  {name:18}" + "".join(f"  {key} {one[key]:.1e}" for key in GROSS))
    if wrong := [name for name, one in found.items() if any(not one[key] <= GROSS[key] for key in GROSS)]:
        raise SystemExit(f"{', '.join(wrong)}: not the update that {sides[0].name} makes; allowed is {GROSS}")
    return found


def steps_of(side: Running, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Make the check's steps, each on-policy, and save the weights."""
    steps: list[dict[str, float]] = []
    for _ in range(CHECK_STEPS):
        side.ask("aim", "spread", deadline_s=deadline_s)
        steps.append(side.step("spread", deadline_s))
    saved = folder / "weights" / side.side.name.replace(" ", "-")
    saved.mkdir(parents=True)
    return {"steps": steps, "folder": side.ask("save", str(saved), deadline_s=deadline_s)[0]}


def apart_from(found: dict[str, Any], name: str, key: str) -> float:
    """Return the largest difference of a step's figure from the first side's; of norms relative to these."""
    reference = next(iter(found.values()))["steps"]
    pairs = [(mine[key], theirs[key]) for mine, theirs in zip(found[name]["steps"], reference, strict=True)]
    return max(abs(mine - theirs) / (abs(theirs) if key == "grad_norm" else 1.0) for mine, theirs in pairs)


def measure(
    args: argparse.Namespace, sides: Sequence[Side], work: Work, batches: Batches, folder: Path
) -> dict[str, Any]:
    """Return for each case and side what its steps came to, and each side's peak; the sides take turns."""
    found: dict[str, Any] = {case: {side.name: [] for side in sides} for case in work.batches}
    with running(sides, work, args, folder) as started:
        first = {side.side.name: warmed(side, batches, args.deadline_s) for side in started}
        same_start(first, GROSS_BF16 if work.bf16 else GROSS["grad_norm"])
        for number in range(args.rounds):
            print(f"  round {number + 1}; load average {os.getloadavg()[0]:.2f}", flush=True)
            for case in work.batches:
                for place in range(len(started)):
                    side = started[(place + number) % len(started)]
                    found[case][side.side.name].append(side.step(case, args.deadline_s))
        peaks = {side.side.name: max(side.ask("peak", deadline_s=args.deadline_s)) for side in started}
    return {"first": first, "steps": found, "peak_mib": peaks}


def warmed(side: Running, batches: Batches, deadline_s: float) -> dict[str, float]:
    """Let the initial weights be those that sampled, make a step that does not count, and return it.

    It is of the case that takes the most memory, so that no later one meets memory for the first time.
    """
    for case in batches:
        side.ask("aim", case, deadline_s=deadline_s)
    return side.step(max(batches, key=lambda case: padded_tokens(batches[case])), deadline_s)


def same_start(first: dict[str, Any], allowed: float) -> None:
    """Print the first step of the sides; SystemExit where a gradient is grossly another."""
    reference = next(iter(first.values()))["grad_norm"]
    for name, step in first.items():
        print(f"  {name:18}  first step: loss {step['loss']:.5f}, gradient norm {step['grad_norm']:.5f}", flush=True)
    if wrong := [name for name, step in first.items() if not abs(step["grad_norm"] / reference - 1) <= allowed]:
        raise SystemExit(f"{', '.join(wrong)}: the first gradient norm is more than {allowed} from the first side's")


def summary(steps: dict[str, list[dict[str, float]]], peaks: dict[str, float], rows: list[Any]) -> dict[str, Any]:
    """Return and print the figures of one case: medians, and what TRL's time is of each side's, round by round."""
    tokens, reference = num_tokens(rows), next((own for name, own in steps.items() if name.startswith("TRL")), [])
    print(f"    {tokens} tokens in {len(rows)} rows, {padded_tokens(rows)} with padding")
    print(f"    {'':18}{'s a step':>9}{'steps/s':>9}{'tokens/s':>10}{'cpu s':>8}{'peak MiB':>10}   TRL's time / this")
    lines: dict[str, Any] = {}
    for name, own in steps.items():
        seconds, cpu_s = (statistics.median(step[key] for step in own) for key in ("s", "cpu_s"))
        ratios = [one["s"] / mine["s"] for one, mine in zip(reference, own, strict=False)]
        text = f"    {name:18}{seconds:9.2f}{1 / seconds:9.3f}{tokens / seconds:10.0f}{cpu_s:8.2f}{peaks[name]:10.0f}"
        if ratios:
            text += f"   {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(text, flush=True)
        rates = {"steps_per_s": 1 / seconds, "tokens_per_s": tokens / seconds}
        lines[name] = {"step_s": seconds, **rates, "cpu_s": cpu_s, "peak_mib": peaks[name], "ratios": ratios}
    return lines


def batches_of(cases: Sequence[str], size: str, groups: int, group_size: int, tokens: int, seed: int) -> Batches:
    vocab = SIZES[size].vocab_size
    return {name: CASES[name].rows(groups, group_size, tokens, vocab, seed) for name in cases}


def work_of(
    model: str, batches: Batches, folder: Path, *, groups: int, group_size: int, micro_batch_tokens: int, **more: Any
) -> Work:
    """Return the work with TRL's micro-batches: as many rows as the same tokens hold, padded, and go into 2 ranks."""
    rows = groups * group_size
    longest_row = max(padded_tokens(batch) for batch in batches.values()) // rows
    fitting = [number for number in range(1, rows // 2 + 1) if (rows // 2) % number == 0]
    return Work(
        model=model,
        batches=write(folder / "batches", batches),
        groups=groups,
        group_size=group_size,
        micro_batch_rows=max(number for number in fitting if number == 1 or number * longest_row <= micro_batch_tokens),
        micro_batch_tokens=micro_batch_tokens,
        max_tokens=max(len(row["answer_ids"]) for batch in batches.values() for row in batch),
        **more,
    )


@contextmanager
def running(sides: Sequence[Side], work: Work, args: argparse.Namespace, folder: Path) -> Iterator[list[Running]]:
    """Start the processes of all sides, and end them."""
    started: list[Running] = []
    chosen = {"trl_python": args.trl_python, "wait_policy": args.trl_wait_policy, "cores": args.cores}
    try:
        started.extend(Running(side, work, folder=folder, **chosen) for side in sides)
        for side in started:
            side.wait()
        yield started
    finally:
        for side in started:
            side.close()


@contextmanager
def model_of(size: str, folder: Path, seed: int) -> Iterator[str]:
    """Make a model's folder for as long as it is needed: it can be large."""
    try:
        yield write_model(size, folder / "model", seed)
    finally:
        shutil.rmtree(folder / "model", ignore_errors=True)
        shutil.rmtree(folder / "weights", ignore_errors=True)


def main() -> None:
    args = arguments(sys.argv[1:])
    args.trl_python = trl_python(args.trl_python) if any(side.backend == TRL for side in args.sides) else ""
    folder = new_folder(args.folder, "train_vs_trl")
    bf16 = args.precision == "bf16" or (args.precision == "auto" and has_bf16())
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(args).items()}, "bf16": bf16}
    if not args.no_check:
        report["check"] = check(args, args.sides, folder / "check")
    batches = batches_of(args.cases, args.size, args.prompts, args.samples, args.tokens, args.seed)
    sizes = {"groups": args.prompts, "group_size": args.samples, "micro_batch_tokens": args.micro_batch_tokens}
    with model_of(args.size, folder, args.seed) as model:
        work = work_of(model, batches, folder, learning_rate=LEARNING_RATE, bf16=bf16, seed=args.seed, **sizes)
        for number in sorted({side.processes for side in args.sides}):
            sides = [side for side in args.sides if side.processes == number]
            print(f"\n{args.size}, {'bf16' if bf16 else 'float32'}, processes a side: {number}, threads: {args.cores}")
            found = measure(args, sides, work, batches, folder / f"{number}-processes")
            for case in work.batches:
                print(f"\n  {case}: {CASES[case].title}")
                found.setdefault("summary", {})[case] = summary(found["steps"][case], found["peak_mib"], batches[case])
            report[f"{number} processes"] = found
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nlogs: {folder}")


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="135M", help="of the measured model")
    parser.add_argument("--cases", type=names_of(CASES), default=list(CASES), help="with commas")
    parser.add_argument("--sides", type=sides_named, default=list(SIDES), help="names, with commas; else all")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side and case, besides a first one")
    parser.add_argument("--prompts", type=int, default=4, help="groups of a batch; an even number")
    parser.add_argument("--samples", type=int, default=8, help="rows of a group")
    parser.add_argument("--tokens", type=int, default=96, help="of a row, prompt and answer, on average")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of a process; TRL's padding counts")
    parser.add_argument(
        "--precision", choices=["auto", "bf16", "float32"], default="auto", help="of the measured model"
    )
    parser.add_argument("--cores", type=int, default=2, help="cores and threads of each side, an even number")
    parser.add_argument("--seed", type=int, default=1)
    add_trl_arguments(parser)
    parser.add_argument("--no-check", action="store_true", help="leave out the tiny model's steps")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="longest time for one step of one side")
    parser.add_argument("--folder", type=Path, help="where logs are written; else below runs/benchmarks")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    args = parser.parse_args(words)
    if args.prompts % 2 or args.samples < 2 or args.tokens < 32 or args.rounds < 1:
        parser.error("--prompts takes an even number, --samples at least 2, --tokens 32 and --rounds 1")
    return args


def names_of(known: Any) -> Any:
    """Return a reader of names with commas, which keeps their order."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def sides_named(text: str) -> list[Side]:
    by_name = {side.name: side for side in (*SIDES, COPIES)}
    return [by_name[name] for name in names_of(by_name)(text)]


if __name__ == "__main__":
    main()
