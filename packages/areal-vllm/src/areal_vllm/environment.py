"""The only reader and writer of environment variables in this package."""

from __future__ import annotations

import os

ACTIVE = "AREAL_VLLM"
"""Set in AReaL's engine processes and what they start: elsewhere the patches stay out of vLLM's way."""


def prepare(device: str, *, compiles: bool) -> None:
    """Set what vLLM must find before it is imported; what the user has set stays, but for the process model.

    `compiles`: the recipe asks for compiled graphs.
    """
    os.environ[ACTIVE] = "1"
    # Scheduler and (with one rank) worker run in this process, between whose steps weights are swapped.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A forked child would inherit this process's threads' locks.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The convention of logprobs under top-k and top-p is patched into the sampler of this runner.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    if device == "cpu":
        # 'auto' would pin every engine to the same first core.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not compiles:
            # A helper of vLLM's sampler is compiled at the first token even so: seconds, for nothing that is used here.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def is_active() -> bool:
    """Whether this process belongs to an engine of AReaL."""
    return os.environ.get(ACTIVE, "") == "1"
