"""The wrapper keeps the engine's contract, counts, and waits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from areal.contracts.component import Component
from areal.contracts.messages import Completion, GenerateRequest, Sampling
from areal.contracts.specs import EngineContext, ModelSpec
from areal.testing.engine import EngineConformance
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model
from areal_example.delayed import DelayedEngine, DelayedEngineOptions
from areal_example.hooks import areal_engines


class TestContract(EngineConformance):
    @pytest.fixture
    def component(self) -> Component:
        return areal_engines()[0]


def test_it_waits_and_counts(tmp_path: Path) -> None:
    options = DelayedEngineOptions(delay_s=0.3, inner={"max_batch": 2})
    context = EngineContext(model=ModelSpec(path=tiny_model(tmp_path)), accelerator=HostCpu(), name="engine-0", seed=0)

    async def generate() -> tuple[float, list[Completion], dict[str, float]]:
        engine = DelayedEngine(options, context)
        await engine.start()
        sampling = Sampling(max_new_tokens=2, temperature=0.0)
        requests = [GenerateRequest(uid=f"{i}", prompt_ids=(1, 5 + i), sampling=sampling, seed=0) for i in range(3)]
        began = time.monotonic()
        completions = await asyncio.gather(*map(engine.generate, requests))
        waited_s = time.monotonic() - began
        load = engine.load()
        await engine.close()
        return waited_s, completions, load

    waited_s, completions, load = asyncio.run(generate())
    assert waited_s >= 0.3
    assert load["requests_total"] == 3
    assert [completion.uid for completion in completions] == ["0", "1", "2"]


def test_the_wrapped_engine_checks_its_own_options(tmp_path: Path) -> None:
    context = EngineContext(model=ModelSpec(path=str(tmp_path)), accelerator=HostCpu(), name="engine-0", seed=0)
    with pytest.raises(ValidationError, match="max_bach"):
        DelayedEngine(DelayedEngineOptions(inner={"max_bach": 2}), context)
