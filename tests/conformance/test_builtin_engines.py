"""The builtin engine passes the kit that plugins are held to."""

from __future__ import annotations

from typing import Any

import pytest

from areal.builtins.hooks import areal_engines
from areal.contracts.component import Component
from areal.testing.engine import EngineConformance


class TestKeep(EngineConformance):
    @pytest.fixture
    def component(self) -> Component:
        (component,) = [offered for offered in areal_engines() if offered.name == "transformers"]
        return component


class TestRecompute(TestKeep):
    """Also with fewer slots than requests, and a cache so small that rows are sent back."""

    kv_on_update = "recompute"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"kv_on_update": "recompute", "max_batch": 7, "max_kv_tokens": 600, "max_prefill_tokens": 64}
