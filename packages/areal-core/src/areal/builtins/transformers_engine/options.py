"""What a recipe may say about the builtin engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal.contracts.options import Options


class TransformersEngineOptions(Options):
    """Invariant: no option changes which tokens a request gets, beyond floating-point rounding and `kv_on_update`."""

    max_batch: int = Field(default=256, ge=1)
    """Most requests that decode together; the others wait."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Most prompt tokens of one forward pass, padding included; a longer prompt has a pass of its own."""
    max_kv_tokens: int = Field(default=131072, ge=1)
    """Most tokens the KV cache may hold (running requests times the longest of them).

    When running requests outgrow it, the youngest goes back to the queue and is recomputed later. A single request
    may exceed it.
    """
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to running requests' KV cache when new weights arrive: kept, or recomputed with the new weights.

    A request that was sent back for room is recomputed in either case.
    """
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
