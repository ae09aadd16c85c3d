"""The fleet: nobody is told of an engine before it serves the current version, nor after it was lost."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from flow_samples import handle_of

from areal.contracts.cluster import Handle
from areal.contracts.transfer import Layout
from areal.errors import WorkerDied, WorkerFailed
from areal.flow.engine import load as load_module
from areal.flow.engine.fleet import Fleet


class ScriptedEngine:
    def __init__(self, name: str, running: float | None = 1.0, failure: Exception | None = None) -> None:
        self.name, self.running, self.failure = name, running, failure
        self.heard: list[str] = []
        self.more: dict[str, float] = {}

    async def pause(self, mode: str) -> None:
        self.heard.append(f"pause {mode}")

    async def start(self) -> Layout:
        if self.failure is not None:
            raise self.failure
        return Layout(host=self.name)

    async def load(self) -> dict[str, float]:
        if self.running is None:
            raise WorkerDied("gone")
        return {"running": self.running, "kv_usage": 0.25} | self.more

    async def close(self) -> None:
        self.heard.append("close")


class Site:
    """A fleet and what it told. Invariant: `told` is every list of names in order."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.waiting = list(engines)
        self.told: list[list[str]] = []
        self.spawned: list[str] = []
        self.fleet = Fleet(self.spawn, self.hear)

    async def spawn(self, name: str) -> Handle:
        self.spawned.append(name)
        return handle_of(name, self.waiting.pop(0) if self.waiting else ScriptedEngine(name))

    async def hear(self, handles: Mapping[str, Handle]) -> None:
        assert all(handle.name == name for name, handle in handles.items())
        self.told.append(list(handles))


async def test_an_engine_serves_after_its_first_commit() -> None:
    site = Site()
    fleet = site.fleet
    assert [await fleet.add(), await fleet.add()] == ["engine-0", "engine-1"]
    assert site.told == [] and fleet.joining
    assert fleet.members["engine-1"].layout == Layout(host="engine-1")
    await fleet.committed(["engine-1"])
    assert site.told == [["engine-1"]] and fleet.joining
    await fleet.committed(["engine-1"])
    assert len(site.told) == 1, "nothing new, nothing said"
    await fleet.committed(["engine-0", "engine-1", "engine-9"])
    assert site.told[-1] == ["engine-0", "engine-1"] and not fleet.joining


async def test_a_lost_engine_is_told_ended_and_replaced_under_a_new_name() -> None:
    engine = ScriptedEngine("one")
    site = Site(engine)
    await site.fleet.add()
    await site.fleet.committed(["engine-0"])
    assert await site.fleet.lost("engine-0")
    assert site.told[-1] == [] and engine.heard == ["close"] and not site.fleet.members
    assert not await site.fleet.lost("engine-0"), "one death, one replacement"
    await site.fleet.add()
    assert site.spawned == ["engine-0", "engine-1"] and site.fleet.joining
    await site.fleet.committed(["engine-1"])
    assert site.told[-1] == ["engine-1"]


async def test_an_engine_that_never_served_is_lost_silently() -> None:
    site = Site()
    await site.fleet.add()
    await site.fleet.lost("engine-0")
    assert site.told == []


async def test_an_engine_that_is_released_interrupts_its_requests_and_then_ends() -> None:
    engine = ScriptedEngine("a")
    site = Site(engine)
    await site.fleet.add()
    await site.fleet.committed(["engine-0"])
    await site.fleet.release("engine-0")
    assert engine.heard == ["pause abort", "close"] and site.told[-1] == [] and not site.fleet.members
    await site.fleet.release("engine-0")
    assert engine.heard == ["pause abort", "close"], "it left once"


async def test_an_engine_that_does_not_start_is_no_member() -> None:
    engine = ScriptedEngine("x", failure=WorkerFailed("no such model"))
    site = Site(engine)
    with pytest.raises(WorkerFailed, match="no such model"):
        await site.fleet.add()
    assert not site.fleet.members and engine.heard == ["close"], "its process is not left behind"


async def test_load_is_that_of_all_members() -> None:
    site = Site(ScriptedEngine("a", 2.0), ScriptedEngine("b", None), ScriptedEngine("c", 3.0))
    assert site.fleet.load == {}
    for _ in range(3):
        await site.fleet.add()
    await site.fleet.measure_load()
    assert site.fleet.load == {"engine/running": 5.0, "engine/kv_usage": 0.25, "engine/silent": 1.0}


async def test_an_engine_that_is_held_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(load_module, "_now", lambda: now)
    engine = ScriptedEngine("a")
    engine.more = {"tokens_total": 7.0}
    fleet = Site(engine).fleet
    await fleet.add()
    for _ in range(3):
        await fleet.measure_load()
        now += 10
    assert fleet.stuck_s("engine-0") == 20.0 and fleet.load_of("engine-0")["running"] == 1.0
    with fleet.held():
        assert fleet.stuck_s("engine-0") == 0.0
    now += 10
    await fleet.measure_load()
    assert fleet.stuck_s("engine-0") == 10.0, "counted from the moment it was let go"
    engine.more = {"tokens_total": 8.0}
    await fleet.measure_load()
    assert fleet.stuck_s("engine-0") == 0.0
