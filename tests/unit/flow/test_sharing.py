"""One device for trainer and engines: who gives, who takes, in which order, and what becomes of those who cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from flow_samples import handle_of, until

from areal.cluster.inline import InlineHandle
from areal.contracts.cluster import Handle
from areal.contracts.transfer import Layout
from areal.errors import TrainerLost, WorkerFailed
from areal.flow.engine.fleet import Fleet
from areal.flow.sharing import DeviceSharing, OwnDevices
from areal.flow.trainer.seat import TrainerSeat


class Engine:
    """Writes down what it is asked. Invariant: `said` is in order, over all workers of the site."""

    def __init__(self, site: Site, name: str) -> None:
        self._site, self._name = site, name

    async def start(self) -> Layout:
        self._site.hear(self._name, "start")
        await self._site.may_start.wait()
        return Layout(host="here")

    async def load(self) -> dict[str, float]:
        return {"running": 1.0, "tokens_total": 0.0}

    async def pause(self, mode: str) -> None:
        self._site.hear(self._name, f"pause {mode}")

    async def offload(self) -> None:
        self._site.hear(self._name, "offload")

    async def onload(self) -> None:
        self._site.hear(self._name, "onload")

    async def resume(self) -> None:
        self._site.hear(self._name, "resume")


class Trainer:
    def __init__(self, site: Site, name: str) -> None:
        self._site, self._name = site, name

    async def offload(self) -> None:
        self._site.hear(self._name, "offload")
        await self._site.may_offload.wait()

    async def onload(self) -> None:
        self._site.hear(self._name, "onload")


class Site:
    """A fleet, a seat and their sharing. Invariant: `heard` is all that was asked of them, in order."""

    def __init__(self, deadline_s: float = 5.0) -> None:
        self.heard: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.lost: list[tuple[str, str]] = []
        self.may_start, self.may_offload = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_offload.set()
        self.handles: dict[str, InlineHandle] = {}
        self.fleet = Fleet(self.spawn_engine, self.use)
        self.seat = TrainerSeat(self.spawn_trainer)
        self.sharing = DeviceSharing(self.fleet, self.seat, deadline_s)
        self.sharing.lost = self.lose

    def hear(self, name: str, what: str) -> None:
        self.heard.append(f"{name} {what}")
        if failure := self.failing.get(f"{name} {what}"):
            raise failure

    def collect(self) -> list[str]:
        heard = self.heard[:]
        self.heard.clear()
        return heard

    async def spawn_engine(self, name: str) -> Handle:
        self.handles[name] = handle_of(name, Engine(self, name))
        return self.handles[name]

    async def spawn_trainer(self, name: str, rank: int) -> Handle:
        self.handles[name] = handle_of(name, Trainer(self, name))
        return self.handles[name]

    async def use(self, handles: Mapping[str, Handle]) -> None: ...

    async def lose(self, name: str, reason: str) -> None:
        self.lost.append((name, reason))
        await self.fleet.lost(name)

    async def begin(self, num_engines: int) -> None:
        for _ in range(num_engines):
            await self.fleet.add()
        await self.seat.fill()
        await self.fleet.committed(list(self.fleet.members))
        self.collect()


async def test_the_engines_leave_before_the_trainer_comes_and_the_other_way_round() -> None:
    site = Site()
    await site.begin(2)
    await site.sharing.to_trainer()
    heard = site.collect()
    for name in ("engine-0", "engine-1"):
        assert [each for each in heard if name in each] == [f"{name} pause keep", f"{name} offload"]
    assert len(heard) == 4, "the trainer had the device from its start"
    await site.sharing.to_engines()
    heard = site.collect()
    assert heard[0] == "trainer-0 offload" and len(heard) == 5
    for name in ("engine-0", "engine-1"):
        assert [each for each in heard if name in each] == [f"{name} onload", f"{name} resume"]
    await site.sharing.to_trainer()
    heard = site.collect()
    assert heard[-1] == "trainer-0 onload" and {"engine-0 offload", "engine-1 offload"} <= set(heard[:-1])


async def test_whoever_has_the_device_already_is_not_asked_again() -> None:
    site = Site()
    await site.begin(1)
    await site.sharing.to_trainer()
    site.collect()
    await site.sharing.to_trainer()
    assert site.collect() == []
    await site.sharing.to_engines()
    site.collect()
    await site.sharing.to_engines()
    assert site.collect() == []


async def test_after_the_trainers_turn_comes_the_engines_whatever_happened_in_it() -> None:
    site = Site()
    await site.begin(1)
    with pytest.raises(ZeroDivisionError):
        async with site.sharing.trainers_turn():
            raise ZeroDivisionError
    assert site.collect()[-3:] == ["trainer-0 offload", "engine-0 onload", "engine-0 resume"]


async def test_the_engines_go_on_when_the_trainer_is_lost_in_giving() -> None:
    site = Site(deadline_s=0.05)
    await site.begin(1)
    await site.sharing.to_trainer()
    site.may_offload.clear()
    site.collect()
    with pytest.raises(TrainerLost, match=r"trainer-0 did not answer 'offload' within 0\.05 s and was ended"):
        await site.sharing.to_engines()
    assert site.collect() == ["trainer-0 offload", "engine-0 onload", "engine-0 resume"]


async def test_another_trainer_has_the_device_from_its_start() -> None:
    site = Site()
    await site.begin(1)
    await site.sharing.to_trainer()
    await site.sharing.to_engines()
    await site.seat.lost("trainer-0", "signal 9")
    site.collect()
    await site.sharing.to_engines()
    assert site.collect() == [], "they have it"
    await site.seat.fill()
    await site.sharing.to_trainer()
    assert site.collect() == ["engine-0 pause keep", "engine-0 offload"]
    await site.sharing.to_engines()
    assert site.collect() == ["trainer-1 offload", "engine-0 onload", "engine-0 resume"]


async def test_without_a_trainer_the_engines_still_leave_and_whoever_calls_it_hears_of_it() -> None:
    site = Site()
    await site.begin(1)
    await site.sharing.to_trainer()
    await site.sharing.to_engines()
    await site.seat.lost("trainer-0", "signal 9")
    site.collect()
    with pytest.raises(TrainerLost, match="signal 9"):
        async with site.sharing.trainers_turn():
            await site.seat.call("train")
    assert site.collect() == ["engine-0 pause keep", "engine-0 offload", "engine-0 onload", "engine-0 resume"]


@pytest.mark.parametrize("call", ["pause keep", "offload", "onload", "resume"])
async def test_an_engine_that_cannot_give_or_take_is_lost_and_the_others_go_on(call: str) -> None:
    site = Site()
    await site.begin(2)
    site.failing[f"engine-0 {call}"] = RuntimeError("no room\nand more of it")
    async with site.sharing.trainers_turn():
        pass
    ((name, reason),) = site.lost
    assert name == "engine-0" and list(site.fleet.members) == ["engine-1"]
    assert reason.startswith(f"engine-0 could not {call.split()[0]} to share its device with the trainer: ")
    assert "no room" in reason and "\n" not in reason
    assert site.collect()[-1] == "engine-1 resume"


async def test_before_there_is_a_keeper_such_an_engine_ends_the_run() -> None:
    site = Site()
    await site.begin(1)
    site.failing["engine-0 offload"] = RuntimeError("no room")
    sharing = DeviceSharing(site.fleet, site.seat)
    with pytest.raises(WorkerFailed, match="engine-0 could not offload to share its device"):
        await sharing.to_trainer()


async def test_an_engine_that_comes_in_the_trainers_turn_waits_for_the_engines() -> None:
    site = Site()
    await site.begin(1)
    await site.sharing.to_trainer()
    coming = asyncio.create_task(site.fleet.add())
    await until(lambda: "engine-1" in site.handles)
    await asyncio.sleep(0.02)
    assert "engine-1 start" not in site.collect() and list(site.fleet.members) == ["engine-0"]
    await site.sharing.to_engines()
    assert await coming == "engine-1"
    site.collect()
    await site.sharing.to_trainer()
    assert "engine-1 offload" in site.heard


async def test_an_engine_that_is_starting_is_waited_for_and_leaves_too() -> None:
    site = Site()
    await site.begin(1)
    site.may_start.clear()
    coming = asyncio.create_task(site.fleet.add())
    await until(lambda: "engine-1 start" in site.heard)
    turn = asyncio.create_task(site.sharing.to_trainer())
    await asyncio.sleep(0.02)
    assert not turn.done() and "engine-0 offload" not in site.heard
    site.may_start.set()
    await turn
    assert await coming == "engine-1" and {"engine-0 offload", "engine-1 offload"} <= set(site.heard)


async def test_an_engine_is_not_stuck_while_the_trainer_has_its_device() -> None:
    site = Site()
    await site.begin(1)
    await site.fleet.measure_load()
    await asyncio.sleep(0.1)
    await site.fleet.measure_load()
    assert site.fleet.stuck_s("engine-0") > 0.09
    await site.sharing.to_trainer()
    assert site.fleet.stuck_s("engine-0") == 0
    await site.sharing.to_engines()
    await site.fleet.measure_load()
    assert site.fleet.stuck_s("engine-0") < 0.05, "it begins anew"


async def test_with_a_device_each_nobody_is_asked() -> None:
    async with OwnDevices().trainers_turn():
        pass
    assert not OwnDevices.is_shared and DeviceSharing.is_shared
