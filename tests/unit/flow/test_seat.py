"""The trainer's seat: whatever happens to the trainer, whoever calls hears TrainerLost until another one sits there."""

from __future__ import annotations

import asyncio

import pytest

from areal.cluster.inline import InlineHandle
from areal.contracts.cluster import Handle
from areal.errors import ConfigError, TrainerLost, WorkerDied, WorkerFailed
from areal.flow.trainer.seat import TrainerSeat


class Trainer:
    async def answer(self, value: int) -> int:
        return value

    async def hang(self) -> None:
        await asyncio.sleep(3600)

    async def fail(self, error: Exception) -> None:
        raise error


class Site:
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.seat = TrainerSeat(self.spawn)

    async def spawn(self, name: str, rank: int) -> Handle:
        return InlineHandle(name, Trainer(), lambda death: self.ended.append(death.name))


async def test_calls_go_to_whoever_sits_there() -> None:
    site = Site()
    with pytest.raises(TrainerLost, match="has not been started"):
        await site.seat.call("answer", 1)
    await site.seat.fill()
    assert await site.seat.call("answer", 1, deadline_s=5.0) == 1 and site.seat.name == "trainer-0"
    assert await site.seat.lost("trainer-0", "signal 9") and not await site.seat.lost("trainer-0", "told twice")
    with pytest.raises(TrainerLost, match=r"^signal 9$"):
        await site.seat.call("answer", 2)
    await site.seat.fill()
    assert not await site.seat.lost("trainer-0", "told late"), "that was another one"
    assert await site.seat.call("answer", 3) == 3 and site.seat.name == "trainer-1"
    assert site.ended == ["trainer-0"]


async def test_a_trainer_that_dies_in_a_call_is_lost() -> None:
    site = Site()
    await site.seat.fill()
    calling = asyncio.create_task(site.seat.call("hang", deadline_s=60.0))
    await asyncio.sleep(0.01)
    await site.seat.ranks["trainer-0"].kill()
    with pytest.raises(TrainerLost, match="trainer-0 was ended while it was asked for 'hang'"):
        await asyncio.wait_for(calling, 5)
    assert not site.seat.ranks


async def test_a_trainer_that_is_ended_in_a_call_is_lost_for_the_reason_it_was_ended_for() -> None:
    site = Site()
    await site.seat.fill()
    calling = asyncio.create_task(site.seat.call("hang", deadline_s=60.0))
    await asyncio.sleep(0.01)
    await site.seat.lost("trainer-0", "trainer-0 gave no sign of life")
    with pytest.raises(TrainerLost, match=r"^trainer-0 gave no sign of life$"):
        await asyncio.wait_for(calling, 5)


async def test_a_trainer_that_hangs_is_ended_and_lost() -> None:
    site = Site()
    await site.seat.fill()
    with pytest.raises(TrainerLost, match=r"trainer-0 did not answer 'hang' within 0\.02 s and was ended"):
        await site.seat.call("hang", deadline_s=0.02)
    assert site.ended == ["trainer-0"] and not site.seat.ranks


@pytest.mark.parametrize("error", [WorkerFailed("bad batch"), ConfigError("bad recipe")])
async def test_what_the_trainer_itself_says_is_no_loss(error: Exception) -> None:
    site = Site()
    await site.seat.fill()
    with pytest.raises(type(error), match="bad") as caught:
        await site.seat.call("fail", error, deadline_s=5.0)
    assert not isinstance(caught.value, TrainerLost) and site.seat.ranks


async def test_a_time_out_of_the_trainers_own_is_no_hang() -> None:
    site = Site()
    await site.seat.fill()
    with pytest.raises(WorkerFailed, match="TimeoutError"):
        await site.seat.call("fail", TimeoutError("a download"), deadline_s=5.0)
    assert not site.ended


async def test_others_who_died_are_not_the_trainer() -> None:
    assert issubclass(TrainerLost, WorkerFailed) and not issubclass(TrainerLost, WorkerDied)
