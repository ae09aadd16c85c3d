"""Tokens per second at a 10x spread of answer lengths, three ways of generating side by side in one run.

    python benchmarks/continuous_batching.py --model FOLDER [--slots 16] [--threads 1] [--dtype bfloat16] [--out FILE]

64 requests with prompts of 24 random tokens, shuffled; 56 of them want 12 tokens, 8 want 120. No token ends an
answer early, so that all three sides make the same 1632 tokens:

- areal: the builtin engine `transformers`;
- padded: batches of ``model.generate``, each running to its longest answer;
- transformers_cb: continuous batching of transformers, ``init_continuous_batching``.

The rounds alternate the sides, so that a busy machine slows all of them; the best round of each side counts.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 24
SHORT, LONG = 12, 120
NUM_REQUESTS = 64


@dataclass(frozen=True)
class Cpu:
    name: str = "cpu"
    collective: str = "gloo"
    resource: str = ""


@dataclass(frozen=True)
class Work:
    prompts: list[tuple[int, ...]]
    lengths: list[int]

    @classmethod
    def make(cls, vocab_size: int) -> Work:
        rng = random.Random(0)
        lengths = [LONG if i % 8 == 0 else SHORT for i in range(NUM_REQUESTS)]
        rng.shuffle(lengths)
        prompts = [tuple(rng.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)) for _ in lengths]
        return cls(prompts, lengths)


def areal_side(args: argparse.Namespace, work: Work) -> Callable[[], int]:
    from areal.builtins.transformers_engine.engine import TransformersEngine
    from areal.builtins.transformers_engine.options import TransformersEngineOptions
    from areal.contracts.messages import GenerateRequest, Sampling
    from areal.contracts.specs import EngineContext, ModelSpec

    spec = ModelSpec(path=args.model, dtype=args.dtype)
    context = EngineContext(model=spec, accelerator=Cpu(), name="engine-0", seed=0)  # pyright: ignore[reportArgumentType]
    runner = asyncio.Runner()
    engine = TransformersEngine(TransformersEngineOptions(max_batch=args.slots), context)
    runner.run(engine.start())
    engine._model.stop_ids = frozenset()  # pyright: ignore[reportOptionalMemberAccess]
    requests = [
        GenerateRequest(uid=str(i), prompt_ids=prompt, sampling=Sampling(max_new_tokens=length), seed=i)
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]

    def close() -> None:
        runner.run(engine.close())
        runner.close()

    async def run() -> int:
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(completion.token_ids) for completion in completions)

    atexit.register(close)
    return lambda: runner.run(run())


def padded_side(args: argparse.Namespace, work: Work, model: Any) -> Callable[[], int]:
    import torch

    @torch.inference_mode()
    def run() -> int:
        for start in range(0, NUM_REQUESTS, args.slots):
            ids = torch.tensor(work.prompts[start : start + args.slots])
            longest = max(work.lengths[start : start + args.slots])
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        return sum(work.lengths)

    return run


def transformers_cb_side(args: argparse.Namespace, work: Work, model: Any) -> Callable[[], int]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=LONG, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=512, max_batch_tokens=512, max_requests_per_batch=args.slots
    )

    def run() -> int:
        # Started anew each time: an idle manager spins and would take the core from the other sides.
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        manager.start()
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(list(prompt), max_new_tokens=length)
        num_tokens = finished = 0
        while finished < NUM_REQUESTS:
            result = manager.get_result(timeout=60)
            if result is None:
                raise SystemExit("transformers' continuous batching gave no result within 60 s")
            if result.is_finished():
                finished += 1
                num_tokens += len(result.generated_tokens)
        manager.stop(block=True)
        return num_tokens

    return run


def measure(sides: dict[str, Callable[[], int]], rounds: int, useful: int) -> dict[str, dict[str, float]]:
    best: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for name, run in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            num_tokens = run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if num_tokens != useful:
                raise SystemExit(f"{name} made {num_tokens} tokens, not {useful}")
            print(
                f"round {number + 1}  {name:16} {wall:6.1f} s wall  {cpu:6.1f} s cpu  {useful / wall:6.1f} tokens/s",
                flush=True,
            )
            if name not in best or wall < best[name]["wall_s"]:
                best[name] = {"wall_s": wall, "cpu_s": cpu, "tokens_per_s": useful / wall}
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder, for example of SmolLM2-135M-Instruct")
    parser.add_argument("--slots", type=int, default=16, help="most requests at a time, on every side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the CPU has no bfloat16 instructions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", default="areal,padded,transformers_cb")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    work = Work.make(model.config.vocab_size)
    chosen = args.sides.split(",")
    makers: dict[str, Callable[[], Callable[[], int]]] = {
        "areal": lambda: areal_side(args, work),
        "padded": lambda: padded_side(args, work, model),
        "transformers_cb": lambda: transformers_cb_side(args, work, model),
    }
    load_before = os.getloadavg()[0]
    best = measure({name: makers[name]() for name in chosen}, args.rounds, sum(work.lengths))
    report: dict[str, Any] = {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "load_average": [load_before, os.getloadavg()[0]],
        "sides": best,
    }
    if "areal" in best:
        ours = best["areal"]["tokens_per_s"]
        report["ratios"] = {name: ours / side["tokens_per_s"] for name, side in best.items() if name != "areal"}
    print(json.dumps({key: report[key] for key in ("load_average", "sides", "ratios") if key in report}, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
