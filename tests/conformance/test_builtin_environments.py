"""The bundled environments pass the kit that plugins are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.builtins.hooks import areal_environments
from areal.contracts.component import Component
from areal.testing.environment import EnvironmentConformance

GSM8K_64 = Path(__file__).parents[1] / "data" / "gsm8k_64.jsonl"
OFFERED = {component.name: component for component in areal_environments()}


class Bundled(EnvironmentConformance):
    """Invariant: the component is the one that the builtin plugin offers."""

    name: str

    @pytest.fixture
    def component(self) -> Component:
        component = OFFERED[self.name]
        if missing := component.missing():
            pytest.skip(f"{', '.join(missing)} is not installed: {component.install}")
        return component


class TestReverseDigits(Bundled):
    name = "reverse_digits"


class TestGsm8k(Bundled):
    name = "gsm8k"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"data": str(GSM8K_64)}


class TestReasoningGym(Bundled):
    name = "reasoning_gym"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {
            "task": "chain_sum",
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "extract": "last_number",
        }


class TestHumanEval(Bundled):
    name = "humaneval"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"allow_code_execution": True}


class TestSim(Bundled):
    name = "sim"
