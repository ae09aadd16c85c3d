"""Tokens per second of vLLM behind AReaL's engine, against vLLM as it is, side by side in one run.

    python benchmarks/vllm_throughput.py [--model FOLDER] [--rounds 5] [--out FILE]

256 requests with prompts of 8 to 128 random tokens want 16 to 160 tokens each. No token ends an answer early, so both
sides make exactly the same number of tokens, at temperature 1, with the sampled token's logprob and a seed for each
request. The sides are two processes that take turns, so that a busy machine slows both of them:

- vllm: `vllm.LLM.generate` with all prompts in one list, everything in one process;
- areal: `areal_vllm.engine.VllmEngine`, 256 calls of `generate` at once, as a rollout makes them.

vLLM lies in an environment of its own, .venvs/vllm, which `make test-vllm` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measuring.cases import pulled_smollm2
from measuring.curve import table
from measuring.peer import START_S, Peer
from measuring.processes import new_folder
from measuring.vllm_environment import add_vllm_options, endless_copy, vllm_options, vllm_python, vllm_variables
from measuring.vllm_sides import Wanted

GOAL = 0.97
"""How much of vLLM's own throughput the engine is to keep."""
PROMPT_TOKENS = (8, 128)
ANSWER_TOKENS = (16, 160)
FIRST_TOKEN = 3
"""Below are special tokens."""
RAW, OURS = "vllm", "areal"

MAX_BATCHED_TOKENS = 16384
"""More than all prompts of a step have together: vLLM itself fails on a CPU in a step that cuts the prompt of a request
with a seed (areal-vllm patches that)."""


def main() -> None:
    args = arguments()
    python = vllm_python(args.vllm_python)
    folder = new_folder(args.folder, "vllm_throughput")
    model, vocab_size = endless_copy(args.model or pulled_smollm2(), folder / "model")
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        sides: dict[str, Peer] = {}
        options = {**vllm_options(args), "max_num_batched_tokens": MAX_BATCHED_TOKENS}
        for name in (RAW, OURS):
            peer = Peer(
                python,
                "measuring.vllm_sides",
                [name],
                log=folder / f"{name}.log",
                cores=args.cores,
                environment=vllm_variables(args.threads),
            )
            sides[name] = stack.enter_context(peer)
            sides[name].ask(model, args.dtype, options, args.raw_scheduling, deadline_s=START_S)
        rounds = [one_round(number, sides, args, vocab_size) for number in range(args.rounds + 1)]
    report = {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "load_average": [load_before, os.getloadavg()[0]],
        **outcome(rounds[1:]),
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nlogs: {folder}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; else SmolLM2-135M-Instruct: areal models pull smollm2")
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the CPU has no bfloat16 instructions")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    add_vllm_options(parser, max_num_seqs=64, kv_cache_mb=1024)
    parser.add_argument(
        "--raw-scheduling",
        choices=["auto", "sync"],
        default="auto",
        help="vLLM's own side; auto: overlapped with computing if vLLM chooses so, sync: never, as in AReaL's engine",
    )
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of each side")
    parser.add_argument("--cores", type=int, default=2, help="cores that each side may use, the same ones")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="longest time for one side's round")
    parser.add_argument("--folder", type=Path, help="where everything is written; else below runs/benchmarks")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def drawn(number: int, num_requests: int, vocab_size: int) -> list[Wanted]:
    """Return a round's requests: lengths are the same in each, prompts are new, so that no prefix is cached."""
    lengths, ids = random.Random(0), random.Random(number + 1)
    return [
        (
            tuple(ids.randrange(FIRST_TOKEN, vocab_size) for _ in range(lengths.randint(*PROMPT_TOKENS))),
            lengths.randint(*ANSWER_TOKENS),
            ids.getrandbits(31),
        )
        for _ in range(num_requests)
    ]


def one_round(number: int, sides: dict[str, Peer], args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Let the sides take their turns and return what each of them did; SystemExit for a token too many or too few."""
    requests = drawn(number, args.requests, vocab_size)
    wanted = [length for _, length, _ in requests]
    figures: dict[str, Any] = {}
    for name, peer in sides.items():
        load = os.getloadavg()[0]
        made, wall_s, cpu_s = peer.ask(requests, deadline_s=args.deadline_s)
        if wrong := [i for i, (has, wants) in enumerate(zip(made, wanted, strict=True)) if has != wants]:
            raise SystemExit(f"{name}: request {wrong[0]} wanted {wanted[wrong[0]]} tokens and got {made[wrong[0]]}")
        tokens = sum(made)
        print(
            f"{f'round {number}' if number else 'warm-up'}  {name:6} {wall_s:6.1f} s wall  {cpu_s:6.1f} s cpu"
            f"  {tokens / wall_s:7.1f} tokens/s  load average {load:.2f}",
            flush=True,
        )
        figures[name] = {"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s, "tokens_per_s": tokens / wall_s}
    return figures


def outcome(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return each side's medians over the rounds, and our part of vLLM's own throughput."""
    sides = {
        name: {figure: statistics.median(one[name][figure] for one in rounds) for figure in rounds[0][name]}
        for name in rounds[0]
    }
    print(f"\nmedians of {len(rounds)} rounds\n{table(sides)}")
    ratio = sides[OURS]["tokens_per_s"] / sides[RAW]["tokens_per_s"]
    by_round = [one[OURS]["tokens_per_s"] / one[RAW]["tokens_per_s"] for one in rounds]
    cpu_ratio = sides[RAW]["cpu_s"] / sides[OURS]["cpu_s"]
    print(
        f"\nareal / vllm: {ratio:.3f} of the medians, {min(by_round):.3f} to {max(by_round):.3f} by round, "
        f"{cpu_ratio:.3f} by processor time; the goal is {GOAL}"
    )
    return {"sides": sides, "rounds": rounds, "ratio": ratio, "ratio_by_round": by_round, "cpu_ratio": cpu_ratio}


if __name__ == "__main__":
    main()
