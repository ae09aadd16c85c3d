"""The engines' load: sums, means and rates over replicas that come, go, fall silent and begin anew."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from flow_samples import handle_of, until

from areal.contracts.cluster import Handle
from areal.errors import WorkerDied
from areal.flow.engine import load
from areal.flow.engine.load import LoadMeter


class Engine:
    """Says `said`. Invariant: None is no answer: it has died; a pending `gate` is one that comes late."""

    def __init__(self, **said: float) -> None:
        self.said: dict[str, float] | None = said
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self) -> dict[str, float]:
        await self.gate.wait()
        if self.said is None:
            raise WorkerDied("gone")
        return self.said


class Clock:
    """Invariant: `now` is what the meter reads."""

    now = 100.0

    def read(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(load, "_now", made.read)
    return made


def handles(**engines: Engine) -> Mapping[str, Handle]:
    return {name: handle_of(name, engine) for name, engine in engines.items()}


async def test_counts_are_summed_and_shares_averaged() -> None:
    meter = LoadMeter()
    one = Engine(running=2.0, kv_usage=0.5, hit_share=1.0, swaps_total=1.0, version=7.0)
    other = Engine(running=3.0, kv_usage=0.1, swaps_total=4.0, version=7.0, waiting=1.0)
    await meter.measure(handles(a=one, b=other))
    assert meter.figures == {
        "engine/running": 5.0,
        "engine/kv_usage": pytest.approx(0.3),
        "engine/hit_share": 1.0,
        "engine/swaps_total": 5.0,
        "engine/waiting": 1.0,
        "engine/silent": 0.0,
    }


async def test_those_who_tell_nothing_are_not_silent() -> None:
    meter = LoadMeter()
    await meter.measure(handles(a=Engine()))
    assert meter.figures == {"engine/silent": 0.0}
    await meter.measure({})
    assert meter.figures == {"engine/silent": 0.0}


async def test_tokens_per_second(clock: Clock) -> None:
    meter, one, other = LoadMeter(), Engine(tokens_total=1000.0), Engine(tokens_total=500.0)

    async def rate(**engines: Engine) -> float | None:
        await meter.measure(handles(**engines))
        clock.now += 10.0
        return meter.figures.get("engine/tokens_per_s")

    assert await rate(a=one, b=other) is None, "nothing to compare with"
    one.said, other.said = {"tokens_total": 1100.0}, {"tokens_total": 550.0}
    assert await rate(a=one, b=other) == 15.0
    assert meter.figures["engine/tokens_total"] == 1650.0
    assert await rate(a=one, b=other) == 0.0
    # The other one dies, and its successor has made 30 tokens since.
    assert await rate(a=one, c=Engine(tokens_total=30.0)) == 3.0
    # Silent for one measurement: what it made meanwhile counts when it speaks again.
    one.said = None
    assert await rate(a=one) is None and meter.figures == {"engine/silent": 1.0}
    one.said = {"tokens_total": 1300.0}
    assert await rate(a=one) == 20.0
    one.said = {"tokens_total": 5.0}
    assert await rate(a=one) == 0.0, "an engine that begins anew by itself"


async def test_all_are_asked_at_once_and_a_slow_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "DEADLINE_S", 0.2)
    meter, quick, slow = LoadMeter(), Engine(running=1.0), Engine(running=10.0)
    slow.gate.clear()
    async with asyncio.timeout(0.39):
        await meter.measure(handles(a=slow, b=quick, c=slow))
    assert meter.figures == {"engine/running": 1.0, "engine/silent": 2.0}


async def test_nobody_is_asked_while_being_asked() -> None:
    meter, slow = LoadMeter(), Engine(running=1.0)
    slow.gate.clear()
    first = asyncio.create_task(meter.measure(handles(a=slow)))
    await until(lambda: meter._is_asking)
    await meter.measure(handles(a=Engine(running=9.0)))
    assert meter.figures == {}
    slow.gate.set()
    await first
    assert meter.figures == {"engine/running": 1.0, "engine/silent": 0.0}
