"""Why nothing comes: the explainer names whoever keeps the trainer waiting, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flow_samples import handle_of, make_prompt, until

from areal.contracts.cluster import Handle
from areal.contracts.messages import Outcome
from areal.contracts.transfer import Layout
from areal.flow import stall as stall_module
from areal.flow.buffer.buffer import ReplayBuffer
from areal.flow.buffer.journal import Issued, Journal
from areal.flow.engine.fleet import Fleet
from areal.flow.keeper import Kind
from areal.flow.prompts.pacing import Pacing
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.worker import GroupRequest, Part
from areal.flow.stall import Scene
from areal.flow.trainer.seat import TrainerSeat

QUIET_S = 0.2


class Engine:
    def __init__(self) -> None:
        self.said = {"running": 0.0, "tokens_total": 0.0}

    async def start(self) -> Layout:
        return Layout(host="here")

    async def load(self) -> dict[str, float]:
        return self.said


class Rollout:
    """Begins a group and never ends it."""

    def start(self) -> dict[str, dict[str, int]]:
        return {}

    async def use_engines(self, handles: Mapping[str, Any]) -> None: ...

    async def run_group(self, request: GroupRequest) -> AsyncIterator[Part]:
        yield make_prompt()
        await asyncio.sleep(3600)


class Site:
    """Two engines, two rollout workers, and groups that nobody finishes."""

    def __init__(self, folder: Path) -> None:
        self.engines: dict[str, Engine] = {}
        self.journal = Journal(folder / "journal.sqlite", create=True)
        self.buffer = ReplayBuffer(self.journal, max_staleness=1, on_excess="drop")
        self.crew = Crew(self.spawn_rollout, 60.0)
        self.fleet = Fleet(self.spawn_engine, self.crew.use_engines)
        self.budget = FailureBudget(max_share=1.0, window=8)
        self.filling: dict[Kind, int] = {"engine": 0, "rollout": 0}
        self.seat = TrainerSeat(self.spawn_rank, 2)
        self.scene = Scene(
            fleet=self.fleet,
            crew=self.crew,
            buffer=self.buffer,
            pacing=Pacing(batch_size=2, max_staleness=1, max_steps=9, served=0, num_issued=3, num_dropped=0),
            budget=self.budget,
            trainer=self.seat,
            filling=self.filling,
        )

    async def spawn_engine(self, name: str) -> Handle:
        self.engines[name] = Engine()
        return handle_of(name, self.engines[name])

    async def spawn_rank(self, name: str, rank: int) -> Handle:
        return handle_of(name, object())

    async def spawn_rollout(self, name: str) -> Handle:
        return handle_of(name, Rollout())

    async def start(self, num_groups: int = 3) -> list[asyncio.Task[None]]:
        for _ in range(2):
            await self.fleet.add()
            await self.crew.add()
        await self.fleet.committed(["engine-0", "engine-1"])
        self.buffer.expect(
            [
                Issued(number=number, environment="digits", prompt_index=0, num_samples=2, issued_version=0)
                for number in range(num_groups)
            ]
        )
        tasks = [asyncio.create_task(self.roll(number)) for number in range(num_groups)]
        await until(lambda: len(self.crew.leases) == num_groups)
        return tasks

    async def roll(self, number: int) -> None:
        request = GroupRequest(number=number, environment="digits", prompt_index=0, samples=())
        async for part in self.crew.run(request, lambda: self.buffer.missing(number)):
            self.buffer.put(number, part)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(stall_module, "PATIENCE_S", 0.1)
    made = Site(tmp_path)
    tasks = await made.start()
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    made.journal.close()


async def test_the_chain_names_what_is_waited_for(site: Site) -> None:
    site.budget.count(Outcome.timeout("the reward of group 3 took too long"))
    found = await site.scene.explain(4, 2, 61.0)
    assert found.sentence == (
        "the trainer waited 61 s for 2 groups of step 4 and nothing arrived: 0 are ready; 3 are being made; "
        "1 more may be issued; 2 of 2 engines serve 2 rollout workers; 1 of the last 1 episodes gave no reward, "
        "the first of all: timeout: the reward of group 3 took too long; all workers answer"
    )
    assert not found.suspects and not found.stacks, "nothing is overdue yet"


async def test_a_worker_that_gives_no_sign_of_life_is_held_responsible(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(deadline_s: float) -> bool:
        return False

    monkeypatch.setattr(site.fleet.members["engine-1"].handle, "ping", silent)
    await asyncio.sleep(QUIET_S)
    found = await site.scene.explain(1, 2, QUIET_S)
    assert found.suspects == {"engine-1": "engine-1 gave no sign of life for 0.1 s"}
    assert found.sentence.endswith("; engine-1 gave no sign of life for 0.1 s")
    assert found.stacks.startswith("==== engine-1\n") and "test_stall" in found.stacks, "what it was doing"


async def test_a_rank_of_the_trainer_that_gives_no_sign_of_life_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.seat.fill()
    assert not (await site.scene.explain(1, 2, 61.0)).suspects

    async def silent(deadline_s: float) -> bool:
        return False

    monkeypatch.setattr(site.seat.ranks["trainer-0.1"], "ping", silent)
    found = await site.scene.explain(1, 2, 61.0)
    assert found.suspects == {"trainer-0.1": "trainer-0.1 gave no sign of life for 0.1 s"}
    assert found.stacks.startswith("==== trainer-0.1\n")


async def test_an_engine_that_makes_no_token_is_held_responsible(site: Site) -> None:
    site.engines["engine-0"].said = {"running": 5.0, "tokens_total": 17.0}
    for _ in range(3):
        await site.fleet.measure_load()
        await asyncio.sleep(QUIET_S / 2)
    found = await site.scene.explain(1, 2, QUIET_S)
    assert list(found.suspects) == ["engine-0"]
    assert found.suspects["engine-0"].startswith("engine-0 has 5 requests and made no token for ")


async def test_when_all_answer_whoever_holds_the_oldest_groups_is_responsible(site: Site) -> None:
    await asyncio.sleep(QUIET_S)
    found = await site.scene.explain(1, 2, QUIET_S)
    assert sorted(found.suspects) == ["rollout-0", "rollout-1"]
    assert "rollout-0 has had group 0 (2 missing), group 2 (2 missing) for 0 s without a sample" in found.sentence


async def test_who_waits_for_an_engine_that_is_being_started_is_not_to_blame(site: Site) -> None:
    for name in ("engine-0", "engine-1"):
        await site.fleet.lost(name)
    starting = asyncio.Event()
    spawn = site.spawn_engine

    async def slowly(name: str) -> Handle:
        await starting.wait()
        return await spawn(name)

    site.fleet._spawn = slowly
    adding = asyncio.create_task(site.fleet.add())
    await asyncio.sleep(QUIET_S)
    found = await site.scene.explain(1, 2, QUIET_S)
    assert found.is_starting and not found.suspects
    assert "0 of 0 engines serve 2 rollout workers; engine-2 has been starting for 0 s" in found.sentence
    starting.set()
    await adding
    found = await site.scene.explain(1, 2, QUIET_S)
    assert found.is_starting, "it waits for its first weights"
    await site.fleet.committed(["engine-2"])
    assert not (await site.scene.explain(1, 2, QUIET_S)).is_starting


async def test_a_worker_that_is_leaving_is_responsible_for_what_it_holds(site: Site) -> None:
    leaving = asyncio.create_task(site.crew.release("rollout-0"))
    await asyncio.sleep(QUIET_S)
    found = await site.scene.explain(1, 2, QUIET_S)
    assert sorted(found.suspects) == ["rollout-0", "rollout-1"]
    assert not await site.crew.lost("rollout-0"), "it has no successor"
    await asyncio.wait_for(leaving, 5)
    await until(lambda: all(lease.worker == "rollout-1" for lease in site.crew.leases.values()))


async def test_a_place_that_is_about_to_be_filled_is_waited_for(site: Site) -> None:
    for name in ("engine-0", "engine-1"):
        await site.fleet.lost(name)
    await asyncio.sleep(QUIET_S)
    found = await site.scene.explain(1, 2, QUIET_S)
    assert not found.is_starting, "nobody comes"
    site.filling["engine"] = 1
    found = await site.scene.explain(1, 2, QUIET_S)
    assert found.is_starting and found.sentence.endswith("; another engine is about to be started")
