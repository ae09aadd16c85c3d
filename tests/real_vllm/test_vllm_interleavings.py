"""Generate, pause, update, resume and abort in any order: every request ends, every token tells its version."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_stands import VllmStand, vllm_stand

from areal.contracts.messages import Completion
from areal.testing.engine_fixtures import long_requests

POOL = 4
"""Different weights that the versions go round in: making a model takes longer than running it."""
PAUSES_S = (0.0, 0.001, 0.004)

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("generate"), st.integers(1, 3), st.integers(1, 24)),
        st.tuples(st.just("sleep"), st.sampled_from(PAUSES_S)),
        st.tuples(st.just("pause"), st.sampled_from(["keep", "abort"])),
        st.tuples(st.just("resume")),
        st.tuples(st.just("update")),
        st.tuples(st.just("roll back")),
        st.tuples(st.just("leave"), st.integers(0, 5)),
    ),
    min_size=2,
    max_size=12,
)


@pytest.fixture(scope="module", params=["keep", "recompute"])
def stand(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStand]:
    with vllm_stand(tmp_path_factory.mktemp("interleaved"), kv_on_update=request.param) as stand:
        yield stand


class Play:
    """One interleaving. Invariant: `issued` holds every request with the version that was in force when it came."""

    def __init__(self, stand: VllmStand, pool: list[Any]) -> None:
        self.stand = stand
        self.pool = pool
        self.issued: list[tuple[int, asyncio.Future[Completion]]] = []
        self.left: set[asyncio.Future[Completion]] = set()

    async def play(self, actions: list[tuple[Any, ...]]) -> list[Completion]:
        for kind, *arguments in actions:
            await getattr(self, kind.replace(" ", "_"))(*arguments)
        await self.stand.engine.resume()
        answers = await asyncio.gather(*(future for _, future in self.issued), return_exceptions=True)
        completions: list[Completion] = []
        for (issued, future), answer in zip(self.issued, answers, strict=True):
            if future in self.left:
                assert isinstance(answer, Completion | asyncio.CancelledError)
                continue
            assert isinstance(answer, Completion), answer
            assert list(answer.versions) == sorted(answer.versions)
            assert all(issued <= version <= self.stand.version for version in answer.versions)
            completions.append(answer)
        return completions

    async def generate(self, number: int, length: int) -> None:
        for request in long_requests(self.stand, number, seed=length, max_new_tokens=length):
            self.issued.append((self.stand.version, asyncio.ensure_future(self.stand.engine.generate(request))))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pause(self, mode: Any) -> None:
        await self.stand.engine.pause(mode)

    async def resume(self) -> None:
        await self.stand.engine.resume()

    async def update(self) -> None:
        version = self._next_version()
        await self.stand.update(version)

    async def roll_back(self) -> None:
        version = self._next_version()
        self.stand.send(version)
        await self.stand.receive("stage", version)
        await self.stand.receive("rollback", version)

    async def leave(self, number: int) -> None:
        if number < len(self.issued):
            future = self.issued[number][1]
            self.left.add(future)
            future.cancel()

    def _next_version(self) -> int:
        version = next(self.stand._versions)
        self.stand.models[version] = self.pool[version % POOL]
        return version


def test_a_thousand_interleavings(stand: VllmStand) -> None:
    pool = [stand.made(seed) for seed in range(POOL)]
    sample = random.Random(1)
    kv: Any = stand.engine._options.kv_on_update
    played = 0

    @settings(
        max_examples=500,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(ACTIONS)
    def interleave(actions: list[tuple[Any, ...]]) -> None:
        nonlocal played
        completions = stand.run(Play(stand, pool).play(actions))
        played += 1
        if completions:
            stand.check(sample.sample(completions, min(3, len(completions))), kv)

    interleave()
    assert played >= 500  # twice: 500 for each way of treating the KV cache


def test_two_hundred_updates_under_load_leave_nothing_hanging(stand: VllmStand) -> None:
    pool = [stand.made(seed) for seed in range(POOL)]

    async def updates() -> list[Completion]:
        play = Play(stand, pool)
        for number in range(200):
            await play.generate(2, 8 + number % 40)
            await play.update()
        return await play.play([])

    completions = stand.run(updates(), 120.0)
    assert len(completions) == 400
    assert all(completion.finish_reason in ("stop", "length") for completion in completions)
    assert sum(len(set(completion.versions)) > 1 for completion in completions) > 50, "requests lived through updates"
    kv: Any = stand.engine._options.kv_on_update
    stand.check(completions[::20], kv)
