"""An engine's process: plugins hear of it before the engine's module is imported."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.contracts.component import Component
from areal.contracts.messages import GenerateRequest, Sampling
from areal.contracts.specs import EngineContext, ModelSpec
from areal.flow.engine.worker import EngineWorker

ENGINE = """
import announced
from areal.contracts.messages import Completion
assert announced.heard == [("own", ("blocked",))], "imported before the announcement"

class Engine:
    def __init__(self, options, context):
        self.said = [("made", options, context.name)]
    async def start(self): return "layout"
    async def generate(self, request):
        return Completion(uid=request.uid, prompt_ids=request.prompt_ids, token_ids=(5,), logprobs=(-1.0,),
                          versions=(0,), finish_reason="stop")
    async def pause(self, mode): self.said.append(("pause", mode))
    async def resume(self): self.said.append("resume")
    async def receive(self, transfer): return ("receipt", transfer)
    async def close(self): self.said.append("close")

class LoadedEngine(Engine):
    def load(self): return {"running": 2.0}

class EndingEngine(Engine):
    async def ended(self): return "the chip is on fire"
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "announced.py").write_text("heard = []\ndef hear(name, blocked): heard.append((name, blocked))\n")
    (tmp_path / "engine_library.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("announced", "engine_library"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def make_worker(name: str) -> Any:
    context = EngineContext(model=ModelSpec(), accelerator=None, name="engine-3", seed=0)  # type: ignore[arg-type]
    component = Component(name="own", factory=f"engine_library:{name}")
    return EngineWorker(component, "options", context, "announced:hear", ("blocked",))


@pytest.mark.usefixtures("library")
async def test_the_announcement_comes_first_and_calls_are_passed_on() -> None:
    worker = make_worker("Engine")
    assert await worker.start() == "layout"
    request = GenerateRequest(uid="0/0/0", prompt_ids=(1,), sampling=Sampling(), seed=1)
    assert not await worker.knows(request) and await worker.recall(request) is None
    completion = await worker.generate(request)
    assert completion.uid == "0/0/0" and await worker.knows(request) and await worker.recall(request) == completion
    assert await worker.receive("transfer") == ("receipt", "transfer")
    await worker.pause()
    await worker.pause("abort")
    await worker.resume()
    await worker.close()
    made = ("made", "options", "engine-3")
    assert worker._engine.said == [made, ("pause", "keep"), ("pause", "abort"), "resume", "close"]


@pytest.mark.usefixtures("library")
async def test_load_of_an_engine_that_tells_and_of_one_that_does_not() -> None:
    assert await make_worker("LoadedEngine").load() == {"running": 2.0, "recalled_total": 0.0}
    del sys.modules["engine_library"], sys.modules["announced"]
    assert await make_worker("Engine").load() == {"recalled_total": 0.0}


@pytest.mark.usefixtures("library")
async def test_the_end_of_an_engine_that_tells_and_of_one_that_does_not() -> None:
    assert await make_worker("EndingEngine").ended() == "the chip is on fire"
    del sys.modules["engine_library"], sys.modules["announced"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(make_worker("Engine").ended(), 0.05)
