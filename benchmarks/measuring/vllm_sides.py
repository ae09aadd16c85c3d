"""One side of vllm_throughput.py in a process of its own: vLLM as it is, or behind AReaL's engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from measuring.peer import parent

Wanted = tuple[tuple[int, ...], int, int]
"""A request: [P] token ids of the prompt, tokens to make, seed."""
Side = Callable[[Sequence[Wanted]], list[int]]
"""Makes all requests and returns how many tokens each one got."""


def raw_side(model: str, dtype: str, arguments: dict[str, Any], scheduling: str) -> Side:
    """Return vLLM's own way; `arguments` are EngineArgs, `scheduling` is sync (as AReaL's engine has it) or auto."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        seed=0,
        max_model_len=-1,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **({"async_scheduling": False} if scheduling == "sync" else {}),
        **arguments,
    )
    print("scheduling overlaps computing:", llm.llm_engine.vllm_config.scheduler_config.async_scheduling, flush=True)

    def run(requests: Sequence[Wanted]) -> list[int]:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt, _, _ in requests]
        params = [
            SamplingParams(max_tokens=length, temperature=1.0, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
            for _, length, seed in requests
        ]
        answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [agreed(answer.token_ids, answer.logprobs) for answer in answers]

    return run


def areal_side(model: str, dtype: str, arguments: dict[str, Any], scheduling: str) -> Side:
    """Return the way of AReaL's rollout; `scheduling` is not its choice."""
    from areal.builtins.accelerators.cpu import CpuAccelerator
    from areal.contracts.messages import GenerateRequest, Sampling
    from areal.contracts.specs import EngineContext, ModelSpec
    from areal_vllm.engine import VllmEngine
    from areal_vllm.options import VllmOptions

    spec = ModelSpec(path=model, dtype=dtype)
    context = EngineContext(model=spec, accelerator=CpuAccelerator(), name="engine-0", seed=0)
    engine = VllmEngine(VllmOptions(**arguments), context)
    runner = asyncio.Runner()
    runner.run(engine.start())

    async def generate(requests: Sequence[Wanted]) -> list[int]:
        calls = [
            GenerateRequest(uid=str(i), prompt_ids=prompt, sampling=Sampling(max_new_tokens=length), seed=seed)
            for i, (prompt, length, seed) in enumerate(requests)
        ]
        completions = await asyncio.gather(*map(engine.generate, calls))
        return [agreed(completion.token_ids, completion.logprobs) for completion in completions]

    return lambda requests: runner.run(generate(requests))


def agreed(token_ids: Sequence[int], logprobs: Sequence[object]) -> int:
    """Return the number of tokens, or -1 when there are not as many logprobs."""
    return len(token_ids) if len(logprobs) == len(token_ids) else -1


SIDES = {"vllm": raw_side, "areal": areal_side}


def main() -> None:
    connection, (name,) = parent()
    run = SIDES[name](*connection.recv())
    connection.send("ready")
    while True:
        try:
            (requests,) = connection.recv()
        except EOFError:
            return
        wall_s, cpu_s = -time.perf_counter(), -time.process_time()
        lengths = run(requests)
        connection.send((lengths, wall_s + time.perf_counter(), cpu_s + time.process_time()))


if __name__ == "__main__":
    main()
