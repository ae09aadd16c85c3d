"""The staleness law at the entrance, under every order of issuing, publishing and dropping."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.flow.prompts.pacing import Pacing


def make(*, batch: int = 2, staleness: int = 0, steps: int = 100, served: int = 0, issued: int = 0) -> Pacing:
    return Pacing(
        batch_size=batch, max_staleness=staleness, max_steps=steps, served=served, num_issued=issued, num_dropped=0
    )


async def taken_now(pacing: Pacing) -> int:
    """Return what `take` gives without anybody's help; 0 when it waits."""
    waiting = asyncio.ensure_future(pacing.take())
    for _ in range(3):
        await asyncio.sleep(0)
    if waiting.done():
        return waiting.result()
    waiting.cancel()
    return 0


async def test_no_staleness_is_synchronous() -> None:
    pacing = make(batch=2, staleness=0)
    seen = []
    for version in range(4):
        seen.append((await taken_now(pacing), await taken_now(pacing)))
        pacing.publish(version + 1)
    assert seen == [(2, 0)] * 4
    assert pacing.num_issued == 8


async def test_one_version_of_lead() -> None:
    pacing = make(batch=2, staleness=1)
    assert [await taken_now(pacing), await taken_now(pacing)] == [4, 0]
    pacing.publish(1)
    assert [await taken_now(pacing), await taken_now(pacing)] == [2, 0]


async def test_the_last_steps_need_no_more_prompts() -> None:
    pacing = make(batch=3, staleness=5, steps=2)
    assert await taken_now(pacing) == 6
    for version in (1, 2):
        pacing.publish(version)
        assert await taken_now(pacing) == 0


async def test_a_waiting_take_is_freed_by_either_event() -> None:
    pacing = make()
    await pacing.take()
    waiting = asyncio.ensure_future(pacing.take())
    await asyncio.sleep(0)
    pacing.drop(1)
    assert await asyncio.wait_for(waiting, 1) == 1
    waiting = asyncio.ensure_future(pacing.take())
    await asyncio.sleep(0)
    pacing.publish(1)
    assert await asyncio.wait_for(waiting, 1) == 2


async def test_a_resumed_run_that_is_ahead_of_its_checkpoint_waits() -> None:
    pacing = make(batch=2, staleness=0, served=1, issued=7)
    assert pacing.num_free == -3
    assert await taken_now(pacing) == 0
    pacing.publish(3)
    assert await taken_now(pacing) == 1


async def test_unfinished_groups_of_an_earlier_run_are_made_in_their_turn() -> None:
    pacing = make(batch=2, staleness=1, served=1, issued=9)
    arrived: list[int] = []

    async def made(number: int) -> None:
        await pacing.turn_of(number)
        arrived.append(number)

    waiting = [asyncio.ensure_future(made(number)) for number in (8, 6, 5, 2)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert sorted(arrived) == [2, 5]
    pacing.drop(1)
    await asyncio.wait_for(waiting[1], 1)
    assert not waiting[0].done()
    pacing.publish(2)
    await asyncio.wait_for(waiting[0], 1)


class PacingMachine(RuleBasedStateMachine):
    """Issues, publishes and drops in any order; the model counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def teardown(self) -> None:
        self.loop.close()

    @initialize(batch=st.integers(1, 5), staleness=st.integers(0, 3), steps=st.integers(1, 12))
    def start(self, batch: int, staleness: int, steps: int) -> None:
        self.batch, self.staleness, self.steps = batch, staleness, steps
        self.pacing = make(batch=batch, staleness=staleness, steps=steps)
        self.useful = self.version = 0

    @rule()
    def take(self) -> None:
        limit = min(self.version + self.staleness + 1, self.steps) * self.batch
        free = limit - self.useful
        assert self.pacing.num_free == free
        got = self.loop.run_until_complete(taken_now(self.pacing))
        assert got == max(0, free), "stuck although something was free, or more than was free"
        self.useful += got

    @precondition(lambda self: self.useful >= (self.version + 1) * self.batch)
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.pacing.publish(self.version)
        assert self.pacing.served == self.version

    @rule(share=st.floats(0, 1))
    def drop(self, share: float) -> None:
        untrained = self.useful - self.version * self.batch
        dropped = int(share * max(0, untrained))
        self.useful -= dropped
        self.pacing.drop(dropped)

    @invariant()
    def law(self) -> None:
        if hasattr(self, "pacing"):
            assert self.useful <= (self.version + self.staleness + 1) * self.batch
            assert self.useful <= self.steps * self.batch


PacingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPacingMachine = PacingMachine.TestCase
