"""Publishing: every engine that verified a version commits it, nobody else does, and nobody stays paused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from flow_samples import handle_of, until

from areal.cluster.inline import InlineHandle
from areal.contracts.component import Component
from areal.contracts.transfer import Layout, Piece, Plan, Receipt, TensorSpec, Transfer
from areal.errors import TransferFailed, WorkerDied, WorkerFailed
from areal.flow.weights import publisher as publisher_module
from areal.flow.weights.publisher import Published, Publisher, Target

SUMS = {"a.weight": 11, "b.weight": 22}
SOURCE = Layout(host="trainer")


class CountingResharder:
    """Invariant: every plan has another `uid`."""

    plans: list[Plan]

    def __init__(self, options: Any, run_dir: str) -> None:
        self.options, self.run_dir = options, run_dir
        type(self).plans = []

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        if not targets[0].host:
            raise TransferFailed("there is no road to an engine without a host")
        made = Plan(uid=f"plan-{len(self.plans)}", source=source, targets=tuple(targets))
        self.plans.append(made)
        return made


class Side:
    """A trainer or an engine. Invariant: `heard` is everything it was asked for, in order."""

    def __init__(self, **failures: BaseException) -> None:
        self.failures = failures
        self.sums = dict(SUMS)
        self.heard: list[str] = []
        self.transfers: list[Transfer] = []

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what in self.failures:
            raise self.failures[what]

    async def begin_send(self, transfer: Transfer) -> None:
        assert transfer.phase == "stage"
        self.transfers.append(transfer)
        self._hear("begin_send")

    async def finish_send(self) -> Receipt:
        self._hear("finish_send")
        return Receipt(version=self.transfers[-1].version, checksums=self.sums, num_bytes=128)

    async def receive(self, transfer: Transfer) -> Receipt:
        self.transfers.append(transfer)
        self._hear(transfer.phase)
        return Receipt(version=transfer.version, checksums=self.sums if transfer.phase == "stage" else {})

    async def pause(self, mode: str) -> None:
        assert mode == "keep"
        self._hear("pause")

    async def resume(self) -> None:
        self._hear("resume")


class Site:
    """A publisher with one trainer and some engines. Invariant: engine i is member i of the plan."""

    def __init__(self, *engines: Side, trainer: Side | None = None, source: Layout = SOURCE, **more: Any) -> None:
        self.trainer = trainer or Side()
        self.engines = engines
        self.handles = [handle_of(f"engine-{number}", engine) for number, engine in enumerate(engines)]
        component = Component(name="counting", factory=f"{__name__}:CountingResharder", **more)
        self.publisher = Publisher(handle_of("trainer-0", self.trainer), source, component, {"bucket": 4}, "run", 2.0)

    def targets(self, *numbers: int) -> list[Target]:
        chosen = numbers or range(len(self.engines))
        return [
            Target(name=f"engine-{number}", handle=self.handles[number], layout=Layout(host=f"host-{number}"))
            for number in chosen
        ]

    async def publish(self, version: int = 1) -> Published:
        staged = await self.publisher.stage(version, self.targets())
        return await asyncio.wait_for(staged.commit(), 10)


WHOLE = ["stage", "pause", "commit", "resume"]


async def test_a_version_reaches_every_engine() -> None:
    site = Site(Side(), Side())
    published = await site.publish(version=9)
    assert published.committed == ("engine-0", "engine-1") and published.failed == {}
    assert published.metrics["weights/bytes"] == 128.0
    assert {"weights/begin_s", "weights/send_s", "weights/receive_s", "weights/commit_s"} < published.metrics.keys()
    (plan,) = CountingResharder.plans
    assert plan.targets == (Layout(host="host-0"), Layout(host="host-1")) and plan.source == SOURCE
    for member, engine in enumerate(site.engines):
        assert engine.heard == WHOLE
        assert [transfer.phase for transfer in engine.transfers] == ["stage", "commit"]
        for transfer in engine.transfers:
            assert (transfer.member, transfer.version, transfer.plan) == (member, 9, plan)
            assert (transfer.options, transfer.resharder.name, transfer.deadline_s) == ({"bucket": 4}, "counting", 2.0)
    (sent,) = site.trainer.transfers
    assert site.trainer.heard == ["begin_send", "finish_send"]
    assert (sent.plan, sent.member, sent.version) == (plan, 0, 9)


@pytest.mark.parametrize("capabilities", [frozenset[str](), frozenset({"shards"})])
async def test_only_who_takes_pieces_is_told_of_them(capabilities: frozenset[str]) -> None:
    spec = TensorSpec(name="a.weight", shape=(4, 2), dtype="float32")
    halves = tuple((Piece(tensor=0, start=(first, 0), shape=(2, 2)),) for first in (0, 2))
    source = Layout(host="trainer", num_ranks=2, tensors=(spec,), pieces=halves)
    await Site(Side(), source=source, capabilities=capabilities).publish()
    (plan,) = CountingResharder.plans
    assert plan.source == (source if capabilities else replace(source, pieces=()))


async def test_generation_goes_on_while_weights_travel() -> None:
    site = Site(Side())
    staged = await site.publisher.stage(1, site.targets())
    await asyncio.sleep(0)
    assert site.engines[0].heard == ["stage"], "not paused yet"
    await staged.roll_back()
    assert site.engines[0].heard == ["stage", "rollback"]


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ({**SUMS, "b.weight": 23}, "1 of 2 tensors arrived with another checksum, the first is 'b.weight'"),
        ({"a.weight": 11}, "1 of 2 tensors arrived with another checksum, the first is 'b.weight'"),
        ({**SUMS, "0": 1}, "1 of 2 tensors arrived with another checksum, the first is '0'"),
    ],
)
async def test_another_checksum_fails_that_engine_alone(sums: dict[str, int], said: str) -> None:
    site = Site(Side(), Side(), Side())
    site.engines[1].sums = sums
    published = await site.publish()
    assert published.committed == ("engine-0", "engine-2") and published.failed == {"engine-1": said}
    assert [engine.heard for engine in site.engines] == [WHOLE, ["stage"], WHOLE]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TransferFailed("the segment is too small"), "the segment is too small"),
        (WorkerDied("engine-0 died"), "engine-0 died"),
        (RuntimeError("out of memory"), "engine-0 failed in 'receive': RuntimeError: out of memory"),
        (asyncio.CancelledError(), "CancelledError"),
        (TransferFailed(), "TransferFailed"),
    ],
)
async def test_an_engine_that_fails_to_receive_never_commits(error: BaseException, said: str) -> None:
    site = Site(Side(stage=error), Side())
    published = await site.publish()
    assert published.committed == ("engine-1",) and published.failed == {"engine-0": said}
    assert site.engines[0].heard == ["stage"]


@pytest.mark.parametrize("moment", ["begin_send", "finish_send"])
@pytest.mark.parametrize("error", [TransferFailed("no room"), WorkerFailed("trainer-0 hung"), TransferFailed()])
async def test_a_sender_that_fails_rolls_everybody_back(error: Exception, moment: str) -> None:
    site = Site(Side(), Side(stage=TransferFailed("nothing came")), Side(), trainer=Side(**{moment: error}))
    said = str(error) or "TransferFailed"
    with pytest.raises(TransferFailed, match=f"version 4 was not published, the trainer could not send it: {said}"):
        await site.publish(4)
    assert [engine.heard for engine in site.engines] == [["stage", "rollback"]] * 3
    assert [transfer.phase for transfer in site.engines[2].transfers] == ["stage", "rollback"]
    assert site.engines[2].transfers[1].member == 2


async def test_an_engine_that_cannot_even_roll_back_stops_nobody() -> None:
    site = Site(Side(rollback=WorkerDied("gone")), Side(), trainer=Side(begin_send=TransferFailed("no")))
    with pytest.raises(TransferFailed, match="could not send it: no"):
        await site.publisher.stage(1, site.targets())
    assert site.engines[1].heard == ["stage", "rollback"]


@pytest.mark.parametrize("moment", ["pause", "commit"])
@pytest.mark.parametrize(
    ("error", "said"),
    [(TransferFailed("torn"), "torn"), (TransferFailed(), "TransferFailed"), (OSError("x"), "OSError")],
)
async def test_an_engine_is_always_resumed(moment: str, error: Exception, said: str) -> None:
    site = Site(Side(**{moment: error}), Side())
    published = await site.publish()
    assert published.committed == ("engine-1",) and said in published.failed["engine-0"]
    assert site.engines[0].heard[-1] == "resume"
    assert site.engines[1].heard == WHOLE


async def test_an_engine_that_does_not_resume_has_failed() -> None:
    site = Site(Side(resume=WorkerDied("engine-0 died")), Side())
    published = await site.publish()
    assert published.failed == {"engine-0": "engine-0 died"} and published.committed == ("engine-1",)


async def test_an_engine_that_hangs_in_a_commit_is_failed_by_its_deadline() -> None:
    class Hanging(Side):
        async def receive(self, transfer: Transfer) -> Receipt:
            if transfer.phase == "commit":
                await asyncio.sleep(60)
            return await super().receive(transfer)

    site = Site(Hanging(), Side())
    site.publisher._deadline_s = 0.05
    published = await site.publish()
    assert published.failed == {"engine-0": "engine-0 did not answer 'receive' within 0.05 s"}
    assert site.engines[0].heard == ["stage", "pause", "resume"]


async def test_plans_last_until_something_changes() -> None:
    site = Site(Side(), Side())

    async def plan_after(*numbers: int) -> str:
        staged = await site.publisher.stage(1, site.targets(*numbers))
        await staged.commit()
        return staged.transfer.plan.uid

    assert [await plan_after(0, 1), await plan_after(0, 1)] == ["plan-0", "plan-0"]
    assert await plan_after(1) == "plan-1", "another member"
    assert await plan_after(1) == "plan-1"
    site.engines[1].sums = {}
    assert await plan_after(1) == "plan-1"
    site.engines[1].sums = dict(SUMS)
    assert await plan_after(1) == "plan-2", "after a receiver's failure"
    for number, moment in enumerate(("begin_send", "finish_send")):
        site.trainer.failures[moment] = TransferFailed("no")
        with pytest.raises(TransferFailed):
            await plan_after(1)
        del site.trainer.failures[moment]
        assert await plan_after(1) == f"plan-{3 + number}", "after the sender's failure"


async def test_no_road() -> None:
    site = Site(Side())
    target = Target(name="engine-0", handle=site.handles[0], layout=Layout(host=""))
    with pytest.raises(TransferFailed, match="there is no road"):
        await site.publisher.stage(1, [target])
    assert site.engines[0].heard == site.trainer.heard == []


async def test_an_engine_that_dies_while_it_receives() -> None:
    class Hanging(Side):
        async def receive(self, transfer: Transfer) -> Receipt:
            self._hear(transfer.phase)
            await asyncio.sleep(60)
            raise AssertionError

    site = Site(Hanging(), Side())
    staged = await asyncio.wait_for(site.publisher.stage(1, site.targets()), 5)
    await until(lambda: site.engines[0].heard)
    dying: InlineHandle = site.handles[0]
    await dying.kill()
    published = await asyncio.wait_for(staged.commit(), 5)
    assert "was ended while it was asked for 'receive'" in published.failed["engine-0"]
    assert published.committed == ("engine-1",)


async def test_the_trainer_does_not_wait_for_a_slow_engine() -> None:
    class Slow(Side):
        arrived = asyncio.Event()

        async def receive(self, transfer: Transfer) -> Receipt:
            await self.arrived.wait()
            return await super().receive(transfer)

    site = Site(Slow(), Side())
    staged = await asyncio.wait_for(site.publisher.stage(1, site.targets()), 5)
    assert site.engines[0].heard == []
    Slow.arrived.set()
    assert (await staged.commit()).committed == ("engine-0", "engine-1")


async def test_the_trainer_goes_on_while_it_sends() -> None:
    class Sending(Side):
        sent = asyncio.Event()

        async def finish_send(self) -> Receipt:
            await self.sent.wait()
            return await super().finish_send()

    site = Site(Side(), trainer=Sending())
    staged = await asyncio.wait_for(site.publisher.stage(1, site.targets()), 5)
    assert site.trainer.heard == ["begin_send"] and site.trainer.transfers[0].overlaps
    committing = asyncio.create_task(staged.commit())
    await until(lambda: site.engines[0].heard == ["stage"])
    assert not committing.done()
    Sending.sent.set()
    assert (await committing).committed == ("engine-0",) and site.engines[0].heard == WHOLE


class WaitingTrainer(Side):
    """Sends only when it is told that a receiver is gone, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def finish_send(self) -> Receipt:
        await self.told.wait()
        raise TransferFailed("engine-0 did not come")

    async def interrupt(self) -> None:
        self.told.set()


async def test_a_sender_that_waits_for_a_dead_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "NOTICE_S", 0.05)
    trainer = WaitingTrainer()
    site = Site(Side(stage=WorkerDied("engine-0 died")), Side(), trainer=trainer)
    with pytest.raises(TransferFailed, match="engine-0 did not come"):
        await site.publish()
    assert trainer.told.is_set() and "rollback" in site.engines[1].heard
