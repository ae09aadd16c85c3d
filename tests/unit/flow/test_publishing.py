"""Versions that are sent beside the next step: what does not arrive is sent again, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flow_samples import handle_of, until

from areal.cluster.inline import InlineHandle
from areal.contracts.cluster import Handle
from areal.contracts.component import Component
from areal.contracts.transfer import Layout, Plan, Receipt, Transfer
from areal.errors import TrainerLost, TransferFailed
from areal.flow import publishing as publishing_module
from areal.flow.engine.fleet import Fleet
from areal.flow.prompts.pacing import Pacing
from areal.flow.publishing import ATTEMPTS, Publishing
from areal.flow.sharing import OwnDevices
from areal.flow.tasks import TaskSet
from areal.flow.trainer.seat import TrainerSeat
from areal.flow.weights.publisher import Publisher

SUMS = {"a.weight": 11}


class Trainer:
    """Sends when it may. Invariant: `begun` are the versions whose weights it took, in order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.failures: list[Exception] = []
        self.trained = 0

    async def begin_send(self, transfer: Transfer) -> None:
        self.begun.append(transfer.version)

    async def finish_send(self) -> Receipt:
        version = self.begun[-1]
        await self.may_send.wait()
        if self.failures:
            raise self.failures.pop(0)
        return Receipt(version=version, checksums=SUMS)

    async def train(self) -> None:
        self.trained += 1


class Engine:
    async def start(self) -> Layout:
        return Layout(host="here")

    async def receive(self, transfer: Transfer) -> Receipt:
        return Receipt(version=transfer.version, checksums=SUMS if transfer.phase == "stage" else {})

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...


class Roads:
    """A resharder. Invariant: every plan is another one."""

    def __init__(self, options: Any, run_dir: str) -> None: ...

    def plan(self, source: Layout, targets: Any) -> Any:
        return Plan(uid=uuid.uuid4().hex, source=source, targets=tuple(targets))


class Site:
    """A publishing with a trainer and an engine. Invariant: `served` are the versions that were committed."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.seat = TrainerSeat(self.spawn_trainer)
        self.fleet = Fleet(self.spawn_engine, self.engines_changed)
        self.served: list[int] = []
        self.num_woken = 0
        self.lost: dict[str, str] = {}
        noted: Callable[[int], None] = lambda version: None  # noqa: E731
        self.publishing = Publishing(
            publisher=Publisher(
                self.seat, Layout(host="here"), Component(name="roads", factory=f"{__name__}:Roads"), None, "run", 5.0
            ),
            fleet=self.fleet,
            journal=SimpleNamespace(published=noted),  # type: ignore[arg-type]
            pacing=Pacing(batch_size=1, max_staleness=0, max_steps=9, served=0, num_issued=0, num_dropped=0),
            keeper=SimpleNamespace(lost=self.engine_lost),  # type: ignore[arg-type]
            sharing=OwnDevices(),
            told=self.served.append,
            wake=self.wake,
        )

    async def spawn_trainer(self, name: str, rank: int) -> Handle:
        return InlineHandle(name, self.trainer, lambda death: None)

    async def spawn_engine(self, name: str) -> Handle:
        return handle_of(name, Engine())

    async def engines_changed(self, engines: Any) -> None: ...

    async def engine_lost(self, name: str, reason: str) -> None:
        self.lost[name] = reason

    def wake(self) -> None:
        self.num_woken += 1


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(publishing_module, "PAUSE_S", 0.01)
    return Site()


async def play(site: Site, scene: Any) -> None:
    await site.seat.fill()
    await site.fleet.add()
    async with asyncio.timeout(20):
        tasks = TaskSet()
        await tasks.run(scene(tasks))


async def test_the_trainer_trains_while_its_weights_travel(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.may_send.clear()
        await site.publishing.publish(tasks, 3)
        await site.seat.call("train")
        serving = asyncio.create_task(site.publishing.serving(3))
        await asyncio.sleep(0.05)
        assert site.trainer.trained == 1 and site.served == [] and not serving.done()
        site.trainer.may_send.set()
        await site.publishing.committed()
        await serving
        assert site.served == [3] and not site.fleet.joining

    await play(site, scene)
    assert site.trainer.begun == [3] and site.num_woken == 0


async def test_a_version_that_did_not_arrive_is_sent_again_to_whoever_waits(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.failures = [TransferFailed("the road broke")]
        await site.publishing.publish(tasks, 5)
        await until(lambda: site.num_woken)
        assert site.served == []
        await site.publishing.bring_up(tasks, 5)
        await site.publishing.committed()
        assert site.served == [5]
        await site.publishing.bring_up(tasks, 5)

    await play(site, scene)
    assert site.trainer.begun == [5, 5] and site.lost == {}


async def test_the_next_version_takes_its_place(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.failures = [TransferFailed("the road broke")]
        await site.publishing.publish(tasks, 5)
        waiting = asyncio.create_task(site.publishing.serving(5))
        await site.publishing.committed()
        await site.publishing.publish(tasks, 6)
        await waiting
        await site.publishing.settled(tasks, 6)

    await play(site, scene)
    assert site.trainer.begun == [5, 6] and site.served == [6]


async def test_settled_is_when_it_has_arrived(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.failures = [TransferFailed("one"), TransferFailed("two")]
        await site.publishing.publish(tasks, 1)
        await site.publishing.settled(tasks, 1)
        assert site.served == [1]

    await play(site, scene)
    assert site.trainer.begun == [1, 1, 1]


async def test_what_never_arrives_ends_the_run(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.failures = [TransferFailed(f"number {n}") for n in range(ATTEMPTS)]
        await site.publishing.publish(tasks, 1)
        await site.publishing.settled(tasks, 1)

    with pytest.raises(TransferFailed, match=f"version 1 was not published.*number {ATTEMPTS - 1}"):
        await play(site, scene)
    assert site.trainer.begun == [1] * ATTEMPTS and site.served == []


async def test_a_trainer_that_is_lost_while_it_sends_leaves_nobody_waiting(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.may_send.clear()
        await site.publishing.publish(tasks, 2)
        await asyncio.sleep(0.01)
        await site.seat.lost("trainer-0", "killed")
        await site.publishing.committed()
        with pytest.raises(TrainerLost, match="killed"):
            await site.publishing.publish(tasks, 2)
        await site.seat.fill()
        site.publishing.begin_anew()
        site.trainer.may_send.set()
        await site.publishing.publish(tasks, 1)
        await site.publishing.settled(tasks, 1)

    await play(site, scene)
    assert site.served == [1]
