"""The only reader and writer of environment variables in this package."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

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
        _keep_freed_memory()


def is_active() -> bool:
    """Whether this process belongs to an engine of AReaL."""
    return os.environ.get(ACTIVE, "") == "1"


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed: each step makes and frees tensors of megabytes.

    vLLM runs in a thread that is not the first, whose memory glibc would give back to the system and fetch anew page
    by page, 4,000 pages a step of SmolLM2: 5 % of the tokens a second. See mallopt(3).
    """
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 2**31 - 1)
