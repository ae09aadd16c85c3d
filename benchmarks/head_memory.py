"""Memory and time of the LM head: logits gathered whole, logprobs gathered, and ours, which never has whole logits.

    python benchmarks/head_memory.py [--rounds 3] [--time-states 1024] [--check-states 512] [--out FILE]

One rank of a sequence-parallel trainer (`--ranks`) computes hidden states of its share of a sequence; then come the
head, logprobs and entropies of all tokens on every rank, and the backward pass, in three ways:

    gather logits    each rank's logits are gathered, and log-softmax runs over the whole sequence
    gather logprobs  each rank has the logits of its own share, and logprobs and entropies are gathered
    ours             the same with areal.algorithms.update.logprobs.head_logprobs

Peaks are bytes alive (measuring/live_bytes.py) while sizes alone are computed (FakeTensorMode): exact to the operation,
the same on every machine. Weight, its gradient, AdamW's two moments and the hidden states with their gradient are in
them, all in the dtype of the row; `floor` is these alone. Cross-check: one rank, a short sequence, real tensors, in a
process of its own each: the peak of its resident memory (VmHWM) beside that of the bytes alive.

Time is that of real forward and backward passes of one rank, gather logprobs (one rank gathers nothing) and ours in
turns in one process; medians of the rounds, and the median of each round's own ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring.head_sides import LOGPROBS, OURS, SIDES, Case, counted, join_fake_group
from measuring.processes import new_folder, run_process

HERE = Path(__file__).resolve().parent
DTYPES = ("bfloat16", "float32")
# Else glibc keeps large freed blocks, and resident memory is not what is alive.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
COUNTED = (LOGPROBS, OURS)


def peaks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of every case, and print those of a line of the table as they come."""
    found: list[dict[str, Any]] = []
    print(f"\nMiB alive at the peak of both passes, V {args.vocab}, H {args.hidden}")
    print(f"{'dtype':>9} {'S':>6} {'ranks':>6}" + "".join(f"{side:>17}" for side in SIDES) + f"{'floor':>9}")
    for ranks in args.ranks:
        join_fake_group(ranks)
        for dtype in DTYPES:
            for sequence in args.sequences:
                cases = [Case(side, sequence, ranks, dtype, args.hidden, args.vocab) for side in SIDES]
                row = [{**asdict(case), **counted(case, fake=True)} for case in cases]
                print(
                    f"{dtype:>9} {sequence:>6} {ranks:>6}"
                    + "".join(f"{one['peak']:>17.0f}" for one in row)
                    + f"{row[0]['floor']:>9.0f}",
                    flush=True,
                )
                found += row
        dist.destroy_process_group()
    return found


def checks(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return VmHWM of real runs beside the bytes alive in the same case."""
    found: list[dict[str, Any]] = []
    print(f"\ncross-check: one rank, S {args.check_states}, real tensors, MiB at the peak")
    for dtype in DTYPES:
        for side in COUNTED:
            case = Case(side, args.check_states, 1, dtype, args.hidden, args.vocab)
            real = apart(case, "memory", args, folder, MALLOC)
            alive = counted(case, fake=True)
            found.append({**asdict(case), "resident": real, "alive": alive})
            print(f"{dtype:>9} {side:>17}: alive {alive['peak']:.0f}, resident {real['peak']:.0f}", flush=True)
    return found


def times(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return seconds of the sides in each round, and their ratios."""
    found: list[dict[str, Any]] = []
    print(f"\ntime of both passes, one rank, {args.time_states} states, {args.threads} threads, {args.rounds} rounds")
    for dtype in DTYPES:
        case = Case(OURS, args.time_states, 1, dtype, args.hidden, args.vocab)
        sides = apart(case, "time", args, folder, {})
        line = {"dtype": dtype, "states": args.time_states, "rounds": sides, **ratios(sides)}
        found.append(line)
        print(
            f"{dtype:>9}: gather logprobs {line['naive_s']:.2f} s, ours {line['ours_s']:.2f} s, "
            f"ratio {line['ratio']:.2f} ({line['lowest']:.2f} to {line['highest']:.2f}); "
            f"of processor time {line['cpu_ratio']:.2f}",
            flush=True,
        )
    return found


def ratios(sides: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    naive, ours = sides[LOGPROBS], sides[OURS]
    each, each_cpu = (
        [mine[key] / other[key] for mine, other in zip(ours, naive, strict=True)] for key in ("s", "cpu_s")
    )
    return {
        "naive_s": statistics.median(one["s"] for one in naive),
        "ours_s": statistics.median(one["s"] for one in ours),
        "ratio": statistics.median(each),
        "lowest": min(each),
        "highest": max(each),
        "cpu_ratio": statistics.median(each_cpu),
    }


def apart(case: Case, what: str, args: argparse.Namespace, folder: Path, environment: dict[str, str]) -> Any:
    """Measure in a process of its own."""
    name = f"{what}-{case.dtype}-{case.side.replace(' ', '-')}"
    asked = {**asdict(case), "what": what, "rounds": args.rounds, "threads": args.threads}
    command = [sys.executable, str(HERE / "measuring/head_sides.py"), json.dumps(asked), str(folder / f"{name}.json")]
    environment = {**environment, "PYTHONPATH": str(HERE)}
    run_process(
        command, log=folder / f"{name}.log", cores=args.cores, environment=environment, deadline_s=args.deadline_s
    )
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["found"]


def main() -> None:
    args = arguments()
    folder = new_folder(args.folder, "head_memory")
    folder.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(args).items()}}
    report["peaks"] = peaks(args)
    if args.check_states:
        report["checks"] = checks(args, folder)
    if args.rounds:
        report["times"] = times(args, folder)
    report["load_average"] = [load_before, os.getloadavg()[0]]
    print(f"\nload average {load_before:.1f} before, {report['load_average'][1]:.1f} after")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=numbers, default=[4096, 8192], help="tokens, with commas")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="ranks a sequence is shared out to")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--check-states", type=int, default=512, help="states of the cross-check; 0: none")
    parser.add_argument("--time-states", type=int, default=1024, help="states whose passes are timed")
    parser.add_argument("--rounds", type=int, default=3, help="of the timing, besides a first one; 0: none")
    parser.add_argument("--threads", type=int, default=2, help="of each measured process")
    parser.add_argument("--cores", type=int, default=2, help="cores a measured process is bound to")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="longest time for one process")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--folder", type=Path, help="where logs and figures of the processes are written")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
