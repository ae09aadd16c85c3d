"""The crew: a group is worked on until all of it arrived, whatever happens to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from flow_samples import make_prompt, make_trajectory, until

from areal.cluster.inline import InlineHandle
from areal.contracts.cluster import Handle
from areal.contracts.messages import Prompt
from areal.errors import ConfigError, WorkerDied, WorkerFailed
from areal.flow.rollout import crew as crew_module
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.worker import GroupRequest, Part


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(crew_module, "SILENCE_GRACE_S", 0.05)


class ScriptedWorker:
    """Makes `good_for` samples and then misbehaves. Invariant: `made` and `asked` tell everything it did."""

    def __init__(self, good_for: int = 1000, then: Exception | str = "hang") -> None:
        self.good_for = good_for
        self.then = then
        self.asked: list[GroupRequest] = []
        self.made: list[int] = []
        self.engines: Mapping[str, Any] | None = None

    def start(self) -> dict[str, dict[str, int]]:
        return {"digits": {"train": 10, "test": 2}}

    async def use_engines(self, handles: Mapping[str, Any]) -> None:
        self.engines = handles

    async def run_group(self, request: GroupRequest) -> AsyncIterator[Part]:
        self.asked.append(request)
        yield make_prompt(request.prompt_index)
        for sample in request.samples:
            if len(self.made) == self.good_for:
                if isinstance(self.then, Exception):
                    raise self.then
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            self.made.append(sample)
            yield make_trajectory(request.number, sample)


class Site:
    """A crew with its workers. Invariant: workers are handed out in the given order."""

    def __init__(self, *workers: ScriptedWorker) -> None:
        self.waiting = list(workers)
        self.handles: dict[str, InlineHandle] = {}
        self.ended: list[str] = []
        self.crew = Crew(self.spawn, 0.05)

    async def spawn(self, name: str) -> Handle:
        handle = InlineHandle(name, self.waiting.pop(0), lambda death: self.ended.append(death.name))
        self.handles[name] = handle
        return handle

    async def start(self, count: int) -> Crew:
        for _ in range(count):
            await self.crew.add()
        return self.crew


def request(number: int = 0) -> GroupRequest:
    return GroupRequest(number=number, environment="digits", prompt_index=4, samples=())


async def play(crew: Crew, num_samples: int = 4, number: int = 0) -> list[int]:
    """Run one group to its end as the loop does; return the samples in the order in which they came."""
    got: list[int] = []

    def missing() -> tuple[int, ...]:
        return tuple(sample for sample in range(num_samples) if sample not in got)

    async with asyncio.timeout(10):
        async for part in crew.run(request(number), missing):
            got += [] if isinstance(part, Prompt) else [part.sample]
    return got


async def test_a_group_is_made_once() -> None:
    worker = ScriptedWorker()
    crew = await Site(worker).start(1)
    assert await play(crew) == [0, 1, 2, 3]
    assert [asked.samples for asked in worker.asked] == [(0, 1, 2, 3)]
    assert crew.num_prompts == {"digits": {"train": 10, "test": 2}}
    assert await play(crew, num_samples=0) == [], "nothing is missing"
    assert len(worker.asked) == 1 and crew.num_reissued == 0


async def test_groups_are_spread_over_the_workers() -> None:
    workers = [ScriptedWorker() for _ in range(3)]
    crew = await Site(*workers).start(3)
    await asyncio.gather(*(play(crew, number=number) for number in range(9)))
    assert [len(worker.asked) for worker in workers] == [3, 3, 3]


@pytest.mark.parametrize("error", [WorkerFailed("rollout-0 hung"), WorkerDied("rollout-0 died")])
async def test_after_a_failure_only_the_missing_samples_are_made_again(error: WorkerFailed) -> None:
    broken, healthy = ScriptedWorker(good_for=2, then=error), ScriptedWorker()
    site = Site(broken, healthy)
    crew = await site.start(1)
    task = asyncio.create_task(play(crew))
    await until(lambda: len(broken.made) == 2)
    await crew.lost("rollout-0")
    await crew.add()
    assert await task == [0, 1, 2, 3]
    assert (broken.made, healthy.made) == ([0, 1], [2, 3])
    assert [asked.samples for asked in healthy.asked] == [(2, 3)]
    assert crew.num_reissued >= 1


async def test_a_worker_that_dies_in_the_middle_of_a_group() -> None:
    dying, healthy = ScriptedWorker(good_for=1, then="hang"), ScriptedWorker()
    site = Site(dying, healthy)
    crew = await site.start(2)
    task = asyncio.create_task(play(crew))
    await until(lambda: dying.made)
    await site.handles["rollout-0"].kill()
    await crew.lost("rollout-0")
    assert await task == [0, 1, 2, 3]
    assert (dying.made, healthy.made) == ([0], [1, 2, 3])


async def test_a_silent_worker_is_ended() -> None:
    silent, healthy = ScriptedWorker(good_for=3, then="hang"), ScriptedWorker()
    site = Site(silent, healthy)
    crew = await site.start(1)
    task = asyncio.create_task(play(crew))
    await until(lambda: site.ended)
    assert site.ended == ["rollout-0"]
    await crew.lost("rollout-0")
    await crew.add()
    assert await task == [0, 1, 2, 3]
    assert healthy.asked[0].samples == (3,)


async def test_without_workers_groups_wait_for_one() -> None:
    site = Site(ScriptedWorker(), ScriptedWorker())
    crew = await site.start(1)
    await crew.lost("rollout-0")
    task = asyncio.create_task(play(crew))
    await asyncio.sleep(0.02)
    assert not task.done()
    await crew.add()
    assert await task == [0, 1, 2, 3]


async def test_attempts_that_bring_nothing_end() -> None:
    broken = ScriptedWorker(good_for=0, then=WorkerFailed("no engine answers"))
    crew = await Site(broken).start(1)
    with pytest.raises(WorkerFailed, match="group 3 failed 6 times in a row: no engine answers"):
        await play(crew, number=3)
    assert len(broken.asked) == 6


async def test_attempts_that_bring_something_go_on() -> None:
    class OneAtATime(ScriptedWorker):
        async def run_group(self, request: GroupRequest) -> AsyncIterator[Part]:
            self.asked.append(request)
            yield make_prompt()
            yield make_trajectory(request.number, request.samples[0])
            raise WorkerFailed("the next engine went away")

    worker = OneAtATime()
    crew = await Site(worker).start(1)
    assert await play(crew, num_samples=12) == list(range(12))
    assert len(worker.asked) == 12


async def test_a_worker_is_lost_once() -> None:
    site = Site(ScriptedWorker(), ScriptedWorker())
    crew = await site.start(2)
    assert [await crew.lost("rollout-0"), await crew.lost("rollout-0"), await crew.lost("rollout-9")] == [
        True,
        False,
        False,
    ]
    assert site.ended == ["rollout-0"] and list(crew.members) == ["rollout-1"]


async def test_leases_say_who_has_what_and_since_when() -> None:
    slow, healthy = ScriptedWorker(good_for=2, then="hang"), ScriptedWorker()
    site = Site(slow, healthy)
    crew = await site.start(1)
    task = asyncio.create_task(play(crew, number=7))
    await until(lambda: len(slow.made) == 2 and crew.leases[7].num_missing == 2)
    lease = crew.leases[7]
    assert (lease.group, lease.worker, lease.attempt) == (7, "rollout-0", 0)
    assert lease.renewed >= lease.since and crew.num_leased("rollout-0") == 1
    await crew.lost("rollout-0")
    await crew.add()
    assert await task == [0, 1, 2, 3]
    assert [asked.attempt for asked in (*slow.asked, *healthy.asked)] == [0, 1]
    assert not crew.leases and crew.num_leased("rollout-1") == 0


async def test_a_worker_that_is_released_finishes_its_groups_first() -> None:
    leaving, staying = ScriptedWorker(), ScriptedWorker()
    site = Site(leaving, staying)
    crew = await site.start(2)
    playing = [asyncio.create_task(play(crew, number=number)) for number in range(2)]
    await until(lambda: leaving.asked and staying.asked)
    await crew.release("rollout-0")
    assert leaving.made == [0, 1, 2, 3] and site.ended == ["rollout-0"]
    assert await playing[0] == await playing[1] == [0, 1, 2, 3] and crew.num_reissued == 0
    assert await play(crew, number=2) == [0, 1, 2, 3] and len(staying.asked) == 2


async def test_what_a_released_worker_does_not_finish_is_leased_anew() -> None:
    leaving, staying = ScriptedWorker(good_for=1, then="hang"), ScriptedWorker()
    site = Site(leaving)
    crew = await site.start(1)
    task = asyncio.create_task(play(crew))
    await until(lambda: leaving.made)
    site.waiting.append(staying)
    await crew.add()
    await crew.release("rollout-0")
    assert await task == [0, 1, 2, 3] and staying.made == [1, 2, 3]


async def test_everybody_knows_the_engines() -> None:
    old, new = {"engine-0": object()}, {"engine-1": object()}
    first, late = ScriptedWorker(), ScriptedWorker()
    site = Site(first, late)
    crew = await site.start(1)
    await crew.use_engines(old)
    changing = crew.use_engines

    class Slow(ScriptedWorker):
        async def use_engines(self, handles: Mapping[str, Any]) -> None:
            if handles is old:
                await changing(new)  # the engines change while the new worker is being told
            await super().use_engines(handles) if handles is new else None

    site.waiting[0] = slow = Slow()
    await crew.add()
    assert first.engines is new and slow.engines is new


async def test_a_worker_that_dies_while_it_is_told_stops_nobody() -> None:
    class Deaf(ScriptedWorker):
        async def use_engines(self, handles: Mapping[str, Any]) -> None:
            if handles:
                raise WorkerDied("deaf")

    deaf, healthy = Deaf(), ScriptedWorker()
    crew = await Site(deaf, healthy).start(2)
    await crew.use_engines({"engine-0": None})
    assert healthy.engines == {"engine-0": None}


async def test_a_worker_that_does_not_start_says_why() -> None:
    class Broken(ScriptedWorker):
        def start(self) -> dict[str, dict[str, int]]:
            raise ConfigError("environment 'digits' needs data")

    site = Site(Broken())
    with pytest.raises(ConfigError, match="needs data"):
        await site.start(1)
    assert site.ended == ["rollout-0"] and not site.crew.members


class Probed(ScriptedWorker):
    """Answers a probe with its name, or dies of it."""

    def __init__(self, answer: list[Any] | Exception) -> None:
        super().__init__()
        self.answer = answer

    async def probe(self, draws: Any, max_new_tokens: int) -> list[Any]:
        await asyncio.sleep(0.01)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [*self.answer, draws, max_new_tokens]


async def test_a_probe_goes_to_another_worker_when_one_dies() -> None:
    site = Site(Probed(WorkerDied("rollout-0 died")), Probed(["second"]))
    crew = await site.start(1)
    probing = asyncio.create_task(crew.probe([("digits", 0)], 8, 5.0))
    await asyncio.sleep(0.01)
    await crew.lost("rollout-0")
    await crew.add()
    assert await asyncio.wait_for(probing, 5) == ["second", [("digits", 0)], 8]


async def test_a_probe_that_always_fails_ends() -> None:
    crew = await Site(Probed(WorkerDied("rollout-0 died"))).start(1)
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(crew.probe([("digits", 0)], 8, 5.0), 5)


async def test_whoever_probes_is_busy() -> None:
    busy, free = Probed(["busy"]), Probed(["free"])
    crew = await Site(busy, free).start(2)
    answers = await asyncio.gather(*(crew.probe([], 1, 5.0) for _ in range(2)))
    assert sorted(answer[0] for answer in answers) == ["busy", "free"]
