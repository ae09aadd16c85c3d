"""A call to several ranks: whose answer counts, whose error is told, and that nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from areal.cluster.inline import InlineHandle
from areal.contracts.cluster import Handle
from areal.contracts.transfer import Receipt
from areal.errors import ConfigError, JournalError, TrainerLost, TransferFailed, WorkerDied, WorkerFailed
from areal.flow.trainer import group as group_module
from areal.flow.trainer.group import RankLost, ask_all, merged
from areal.flow.trainer.seat import TrainerSeat


class Rank:
    """Answers, fails or waits as its plan says. Invariant: `interrupts` counts who told it that it waits in vain."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failure: BaseException | None = None
        self.waits = False
        self.interrupts = 0

    async def work(self, value: int) -> int:
        if self.waits:
            await asyncio.sleep(3600)
        if self.failure is not None:
            raise self.failure
        return 10 * self.rank + value

    async def send(self) -> Receipt:
        checksums = {f"w[{self.rank}:{self.rank + 1}]": self.rank}
        return Receipt(version=3, checksums=checksums, num_bytes=4, seconds=float(self.rank))

    async def interrupt(self) -> None:
        self.interrupts += 1


class Site:
    """Invariant: `ended` are the ranks that were ended, in order."""

    def __init__(self, num_ranks: int = 3) -> None:
        self.ended: list[str] = []
        self.held: list[Rank] = []
        self.refused: Mapping[int, WorkerFailed] = {}
        self.seat = TrainerSeat(self.spawn, num_ranks)

    async def spawn(self, name: str, rank: int) -> Handle:
        if rank in self.refused:
            raise self.refused[rank]
        self.held.append(Rank(rank))
        return InlineHandle(name, self.held[-1], lambda death: self.ended.append(death.name))


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(group_module, "STRAGGLE_S", 0.05)
    made = Site()
    await made.seat.fill()
    return made


async def test_all_ranks_are_asked_and_rank_0_answers(site: Site) -> None:
    assert list(site.seat.ranks) == ["trainer-0", "trainer-0.1", "trainer-0.2"] and site.seat.name == "trainer-0"
    assert await site.seat.call("work", 7) == 7
    site.held[1].failure = site.held[2].failure = ConfigError("only rank 0 is asked")
    assert await site.seat.call_first("work", 7) == 7


async def test_receipts_become_one(site: Site) -> None:
    receipt = await site.seat.call("send")
    assert receipt.checksums == {"w[0:1]": 0, "w[1:2]": 1, "w[2:3]": 2}
    assert (receipt.version, receipt.num_bytes, receipt.seconds) == (3, 12, 2.0)


def test_a_piece_that_two_ranks_sent_is_an_error() -> None:
    twice = Receipt(version=4, checksums={"a": 1, "b": 2})
    with pytest.raises(TransferFailed, match="two trainer ranks sent 'b' of version 4"):
        merged([Receipt(version=4, checksums={"b": 2}), twice])


async def test_the_first_failure_is_told_once_all_have_ended(site: Site) -> None:
    site.held[1].failure = JournalError("no room")
    with pytest.raises(JournalError, match="no room"):
        await site.seat.call("work", 1)
    assert len(site.seat.ranks) == 3 and not site.ended, "all of them answered: the trainer is whole"


async def test_who_waits_for_a_rank_that_failed_is_ended_and_the_failure_told(site: Site) -> None:
    site.held[0].waits, site.held[1].failure = True, JournalError("no room")
    with pytest.raises(JournalError, match="no room"):
        await site.seat.call("work", 1)
    assert sorted(site.ended) == ["trainer-0", "trainer-0.1", "trainer-0.2"] and not site.seat.ranks
    assert site.held[0].interrupts == 1, "it was told before"
    with pytest.raises(TrainerLost, match=r"no room; trainer-0 did not end 'work' after that and was ended"):
        site.seat.check()


async def test_a_failure_that_may_be_a_loss_is_one_when_others_are_silent(site: Site) -> None:
    site.held[0].failure, site.held[1].waits = RuntimeError("connection closed by peer"), True
    with pytest.raises(TrainerLost, match=r"closed by peer; trainer-0\.1 did not end 'work' after that"):
        await site.seat.call("work", 1)
    assert site.seat.culprit == "trainer-0.1"


async def test_a_death_says_more_than_the_failures_of_those_who_waited(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "STRAGGLE_S", 30.0)
    site.held[0].failure, site.held[1].waits = RuntimeError("connection closed by peer"), True
    calling = asyncio.create_task(site.seat.call("work", 1))
    await asyncio.sleep(0.01)
    handle = site.seat.ranks["trainer-0.1"]
    await handle.kill()
    with pytest.raises(TrainerLost, match=r"^trainer-0\.1 was ended"):
        await asyncio.wait_for(calling, 5)
    assert site.seat.culprit == "trainer-0.1" and len(site.ended) == 3


async def test_who_is_silent_at_the_deadline_is_named(site: Site) -> None:
    site.held[1].waits = site.held[2].waits = True
    reason = r"^trainer-0\.1 and trainer-0\.2 did not answer 'work' within 0\.02 s and were ended$"
    with pytest.raises(TrainerLost, match=reason):
        await site.seat.call("work", 1, deadline_s=0.02)
    assert len(site.ended) == 3


async def test_a_rank_that_is_lost_from_outside_takes_all_along(site: Site) -> None:
    for rank in site.held:
        rank.waits = True
    calling = asyncio.create_task(site.seat.call("work", 1))
    await asyncio.sleep(0.01)
    assert await site.seat.lost("trainer-0.2", "signal 9") and not await site.seat.lost("trainer-0", "ended with it")
    with pytest.raises(TrainerLost, match=r"^trainer-0\.2: signal 9$"):
        await asyncio.wait_for(calling, 5)
    await site.seat.fill()
    assert list(site.seat.ranks) == ["trainer-1", "trainer-1.1", "trainer-1.2"] and site.seat.culprit == "trainer-1"


async def test_a_rank_that_does_not_start_takes_the_others_back() -> None:
    site = Site()
    site.refused = {1: WorkerFailed("trainer-0.1 did not start: no room")}
    with pytest.raises(WorkerFailed, match=r"trainer-0\.1 did not start"):
        await site.seat.fill()
    assert site.ended == ["trainer-0", "trainer-0.2"] and not site.seat.ranks


async def test_whoever_stops_waiting_leaves_no_call_behind(site: Site) -> None:
    site.held[2].waits = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await ask_all(site.seat.ranks, "work", (1,), None)
    assert len(asyncio.all_tasks()) == 1 and len(site.seat.ranks) == 3


async def test_a_dead_rank_is_no_answer() -> None:
    site = Site(2)
    await site.seat.fill()
    await site.seat.ranks["trainer-0.1"].kill()
    with pytest.raises(RankLost) as caught:
        await ask_all(site.seat.ranks, "work", (1,), 5.0)
    assert caught.value.name == "trainer-0.1" and isinstance(caught.value.__cause__, WorkerDied)
