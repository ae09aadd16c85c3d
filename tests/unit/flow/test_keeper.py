"""The keeper: what is lost comes back, what hangs is ended, and who is asked to leave leaves nothing undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from flow_samples import until

from areal.cluster.inline import InlineCluster
from areal.contracts.cluster import Handle, WorkerSpec
from areal.contracts.options import Options
from areal.contracts.transfer import Layout
from areal.errors import ConfigError, TrainerLost, WorkerFailed
from areal.flow.engine.fleet import Fleet
from areal.flow.keeper import Bounds, Keeper, KeeperSettings
from areal.flow.restarts import Restarts
from areal.flow.rollout.crew import Crew
from areal.flow.tasks import TaskSet
from areal.flow.trainer.seat import TrainerSeat


class Engine:
    """Says of itself what the test wants. Invariant: `said` is its load."""

    def __init__(self) -> None:
        self.said = {"running": 1.0, "tokens_total": 0.0}

    async def start(self) -> Layout:
        return Layout(host="here")

    async def load(self) -> dict[str, float]:
        return self.said

    async def pause(self, mode: str) -> None: ...


class Rollout:
    def start(self) -> dict[str, dict[str, int]]:
        return {}

    async def use_engines(self, handles: Any) -> None: ...


class Trainer: ...


class Site:
    """A keeper with real handles of an inline cluster. Invariant: `refused` is what the next spawns raise."""

    def __init__(
        self, *, most_lost: int = 10, hang_timeout_s: float = 60.0, num_ranks: int = 1, **bounds: Bounds
    ) -> None:
        self.cluster = InlineCluster(Options(), "")
        self.seat = TrainerSeat(self.spawner("Trainer"), num_ranks)
        self.crew = Crew(self.spawner("Rollout"), 5.0)
        self.fleet = Fleet(self.spawner("Engine"), self.crew.use_engines)
        self.refused: list[WorkerFailed] = []
        self.said: list[str] = []
        self.losses: list[tuple[str, str, int]] = []
        self.num_changes = 0
        self.restarts = Restarts(most=most_lost, window_s=600.0, backoff_s=0.01)
        self.keeper = Keeper(
            KeeperSettings(
                hang_timeout_s=hang_timeout_s,
                bounds={
                    "engine": bounds.get("engine", Bounds(fewest=1, wanted=2, most=3)),
                    "rollout": bounds.get("rollout", Bounds(fewest=1, wanted=1, most=2)),
                },
            ),
            cluster=self.cluster,
            seat=self.seat,
            fleet=self.fleet,
            crew=self.crew,
            restarts=self.restarts,
            ledger=self,
            listener=self,
        )

    def spawner(self, worker: str) -> Callable[..., Any]:
        async def spawn(name: str, rank: int = 0) -> Handle:
            if self.refused and worker != "Trainer":
                raise self.refused.pop(0)
            return await self.cluster.spawn(WorkerSpec(name=name, kind="x", factory=f"{__name__}:{worker}"))

        return spawn

    # the ledger and the listener
    def lost(self, worker: str, reason: str, step: int) -> None:
        self.losses.append((worker, reason, step))

    def replaced(self, name: str, reason: str) -> None:
        self.said.append(f"{name} replaced")

    def warned(self, sentence: str) -> None:
        self.said.append(sentence)

    def change(self) -> None:
        self.num_changes += 1

    async def play(self, scene: Callable[[], Any], *, engines: int = 2) -> None:
        """Start everybody, run a scene beside the keeper, end."""
        for _ in range(engines):
            await self.fleet.add()
        await self.crew.add()
        await self.seat.fill()
        await self.fleet.committed(list(self.fleet.members))
        tasks = TaskSet()
        self.keeper.start(tasks, self.change)
        async with asyncio.timeout(20):
            await tasks.run(scene())

    def engine(self, name: str) -> Engine:
        return self.fleet.members[name].handle._worker  # type: ignore[attr-defined]


async def test_whoever_dies_is_replaced_once_and_journalled() -> None:
    site = Site()

    async def scene() -> None:
        site.keeper.step = 7
        await site.fleet.members["engine-0"].handle.kill()
        await until(lambda: "engine-2" in site.fleet.members)
        await site.crew.members["rollout-0"].kill()
        await until(lambda: "rollout-1" in site.crew.members)
        await asyncio.sleep(0.02)

    await site.play(scene)
    assert sorted(site.fleet.members) == ["engine-1", "engine-2"] and list(site.crew.members) == ["rollout-1"]
    assert [(name, step) for name, _, step in site.losses] == [("engine-0", 7), ("rollout-0", 7)]
    assert site.said == ["engine-0 replaced", "rollout-0 replaced"]
    assert site.num_changes == 2, "whoever waits for a batch looks at the new engine"
    assert site.keeper.num_lost == 2


async def test_a_dead_trainer_wakes_whoever_waits_and_is_nobody_elses() -> None:
    site = Site()

    async def scene() -> None:
        await site.seat.ranks["trainer-0"].kill()
        await until(lambda: site.num_changes)

    await site.play(scene)
    assert not site.seat.ranks and not site.said, "who goes back to the checkpoint says so"


async def test_a_rank_that_gives_no_sign_of_life_is_the_trainers_end_and_named() -> None:
    site = Site(num_ranks=3, hang_timeout_s=0.2)

    async def scene() -> None:
        said = {row.name: (row.state, row.work) for row in await site.keeper.rows() if row.kind == "trainer"}
        assert said == {
            name: ("working", f"rank {rank} of 3")
            for rank, name in enumerate(("trainer-0", "trainer-0.1", "trainer-0.2"))
        }
        with pytest.raises(ConfigError, match=r"trainer-0\.2 belongs to the trainer, without which no run goes on"):
            await site.keeper.remove("trainer-0.2")

        async def silent(deadline_s: float) -> bool:
            await asyncio.sleep(deadline_s)
            return False

        site.seat.ranks["trainer-0.2"].ping = silent  # type: ignore[method-assign]
        await until(lambda: site.num_changes)
        with pytest.raises(TrainerLost, match=r"^trainer-0\.2 gave no sign of life for 0\.2 s$"):
            site.seat.check()
        site.keeper.step = 5
        await site.keeper.trainer_lost("trainer-0.2 gave no sign of life")

    await site.play(scene)
    assert site.losses == [("trainer-0.2", "trainer-0.2 gave no sign of life", 5)]
    assert site.said == ["trainer-0.2 replaced"] and site.keeper.num_lost == 1


async def test_a_trainer_is_counted_and_waits_longer_when_it_keeps_dying() -> None:
    site = Site(most_lost=3)

    async def scene() -> None:
        for _ in range(3):
            await site.seat.lost(site.seat.name, "signal 9")
            await site.keeper.trainer_lost("signal 9")
            await site.seat.fill()
            site.keeper.trainer_started()
        await site.keeper.trainer_lost("signal 9")

    with pytest.raises(WorkerFailed, match="4 workers were lost within 600 s, more than the 3"):
        await site.play(scene)
    assert [name for name, _, _ in site.losses] == ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]


async def test_a_trainer_that_cannot_be_started_is_tried_again_with_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(most_lost=5)
    pauses: list[float] = []

    async def scene() -> None:
        sleep = asyncio.sleep

        async def slept(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        await site.seat.lost(site.seat.name, "its node died")
        with monkeypatch.context() as patch:
            patch.setattr("areal.flow.keeper.asyncio.sleep", slept)
            for _ in range(5):
                await site.keeper.trainer_lost("no room for it")

    await site.play(scene)
    assert [pause for pause in pauses if pause != 30.0] == [0.0, 0.01, 0.02, 0.04, 0.08]


async def test_a_place_is_tried_again_until_somebody_can_be_started() -> None:
    site = Site(most_lost=1)

    async def scene() -> None:
        site.refused = [WorkerFailed("no room for it")] * 3
        await site.fleet.members["engine-0"].handle.kill()
        await until(lambda: "engine-5" in site.fleet.members)

    await site.play(scene)
    assert site.said[1].startswith("another engine could not be started, next")
    assert len(site.said) == 4 and site.keeper.num_lost == 1, "one engine is enough, so attempts do not count"


async def test_attempts_count_below_the_recipes_fewest() -> None:
    site = Site(most_lost=2, engine=Bounds(fewest=2, wanted=2, most=2))

    async def scene() -> None:
        site.refused = [WorkerFailed("no room for it")] * 3
        await site.fleet.members["engine-0"].handle.kill()
        await asyncio.sleep(20)

    with pytest.raises(WorkerFailed, match=r"(?s)3 workers were lost.*a new engine: no room for it"):
        await site.play(scene)


async def test_what_could_not_be_started_at_first_is_started_later() -> None:
    site = Site()

    async def scene() -> None:
        await until(lambda: len(site.fleet.members) == 2)

    await site.play(scene, engines=1)


async def test_a_hanging_worker_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(hang_timeout_s=0.05)

    async def silent(deadline_s: float) -> bool:
        await asyncio.sleep(deadline_s)
        return False

    async def scene() -> None:
        site.engine("engine-1").said = {}
        hanging = site.fleet.members["engine-1"].handle
        end = hanging.kill

        async def end_slowly() -> None:
            await end()
            await asyncio.sleep(0.05)  # a frozen process takes a moment, in which its death is reported

        monkeypatch.setattr(hanging, "ping", silent)
        monkeypatch.setattr(hanging, "kill", end_slowly)
        site.engine("engine-0").said = {"running": 0.0, "tokens_total": 3.0}
        await until(lambda: "engine-2" in site.fleet.members)

    await site.play(scene)
    assert "engine-0" in site.fleet.members, "idle is not stuck"
    assert site.losses[0][:2] == ("engine-1", "engine-1 gave no sign of life for 0.05 s")


async def test_a_dead_worker_is_no_hanging_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death says more than its silence, and may be noticed later than a question is refused."""
    site = Site(hang_timeout_s=0.05)

    async def refused(deadline_s: float) -> bool:
        return False

    async def scene() -> None:
        monkeypatch.setattr(site.fleet.members["engine-1"].handle, "ping", refused)
        site.engine("engine-0").said = site.engine("engine-1").said = {"running": 0.0, "tokens_total": 3.0}
        await asyncio.sleep(0.2)
        assert site.losses == []
        await site.fleet.members["engine-1"].handle.kill()
        await until(lambda: "engine-2" in site.fleet.members)

    await site.play(scene)
    assert site.losses[0][:2] == ("engine-1", "it was ended by the controller")


async def test_an_engine_that_makes_no_token_is_ended_and_one_that_does_is_not() -> None:
    site = Site(hang_timeout_s=0.2)

    async def scene() -> None:
        while "engine-2" not in site.fleet.members:
            site.engine("engine-0").said = {"running": 1.0, "tokens_total": asyncio.get_running_loop().time()}
            await asyncio.sleep(0.01)

    await site.play(scene)
    (name, reason, _), *_ = site.losses
    assert name == "engine-1" and reason.startswith("engine-1 has had requests and has made no token for")
    assert "engine-0" in site.fleet.members


async def test_workers_are_added_up_to_the_recipes_most_and_released_down_to_its_fewest() -> None:
    site = Site()

    async def scene() -> None:
        assert await site.keeper.add("engine") == "engine-2"
        with pytest.raises(
            ConfigError, match=r"one more engine was asked for and the recipe allows 3; raise engine\.max"
        ):
            await site.keeper.add("engine")
        assert await site.keeper.add("rollout") == "rollout-1"
        await site.fleet.committed(["engine-2"])
        for name in ("engine-0", "engine-1"):
            await site.keeper.remove(name)
        with pytest.raises(ConfigError, match=r"engine-2 was to leave .* at least 1 of its kind; lower engine\.min"):
            await site.keeper.remove("engine-2")
        with pytest.raises(ConfigError, match=r"no engine or rollout worker is called 'engine-1'.*did you mean"):
            await site.keeper.remove("engine-1")
        await asyncio.sleep(0.05)
        rows = {row.name: (row.kind, row.state, row.work) for row in await site.keeper.rows()}
        assert rows == {
            "engine-2": ("engine", "serving", "1 requests running, 0 waiting"),
            "rollout-0": ("rollout", "working", "0 groups"),
            "rollout-1": ("rollout", "working", "0 groups"),
            "trainer-0": ("trainer", "working", ""),
        }

    await site.play(scene)
    assert not site.losses, "who was asked to leave is not lost"


async def test_nobody_leaves_who_is_needed_until_others_have_started() -> None:
    site = Site()

    async def scene() -> None:
        site.refused = [WorkerFailed("no room")] * 1000
        await site.fleet.members["engine-0"].handle.kill()
        await until(lambda: "engine-0" not in site.fleet.members)
        with pytest.raises(ConfigError, match="engine-1 was to leave and only 1 of its kind is at work now"):
            await site.keeper.remove("engine-1")

    await site.play(scene)
    assert "engine-1" in site.fleet.members


async def test_who_is_coming_and_leaving_is_listed_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(hang_timeout_s=0.05)

    async def silent(deadline_s: float) -> bool:
        await asyncio.sleep(deadline_s)
        return False

    async def scene() -> None:
        site.engine("engine-0").said = site.engine("engine-1").said = {"running": 0.0, "tokens_total": 3.0}
        await site.keeper.add("rollout")
        gate = asyncio.Event()
        spawn = site.cluster.spawn

        async def slowly(spec: WorkerSpec) -> Any:
            await gate.wait()
            return await spawn(spec)

        monkeypatch.setattr(site.cluster, "spawn", slowly)
        adding = asyncio.create_task(site.keeper.add("engine"))
        site.crew._busy["rollout-0"] = 1  # a group that never ends
        leaving = asyncio.create_task(site.keeper.remove("rollout-0"))
        await until(lambda: site.fleet.coming and site.crew.leaving)
        rows = {row.name: (row.state, row.pid > 0) for row in await site.keeper.rows()}
        assert rows["engine-2"] == ("starting", False) and rows["rollout-0"] == ("leaving", True)
        monkeypatch.setattr(site.crew.leaving["rollout-0"], "ping", silent)
        await until(lambda: not site.crew.leaving)
        site.crew._busy["rollout-0"] = 0
        site.crew._freed.set()
        await leaving
        gate.set()
        assert await adding == "engine-2"

    await site.play(scene)
    assert not site.losses, "who was leaving needs no successor"


async def test_a_worker_that_cannot_be_added_leaves_the_numbers_as_they_were() -> None:
    site = Site()

    async def scene() -> None:
        site.refused = [WorkerFailed("no room")]
        with pytest.raises(WorkerFailed, match="no room"):
            await site.keeper.add("engine")
        assert await site.keeper.add("engine") == "engine-3"

    await site.play(scene)
