"""The real vLLM against the conformance kit of engines, with both ways of treating running requests' KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from areal.contracts.component import Component
from areal.testing.engine import EngineConformance
from areal_vllm.hooks import areal_engines


class TestKeptCache(EngineConformance):
    """Invariant: as the kit's."""

    kv_on_update = "keep"

    @pytest.fixture
    def component(self) -> Component:
        return areal_engines()[0]

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32, "check_loaded": "always"}


class TestRecomputedCache(TestKeptCache):
    """Invariant: as the kit's."""

    kv_on_update = "recompute"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32, "kv_on_update": "recompute"}
