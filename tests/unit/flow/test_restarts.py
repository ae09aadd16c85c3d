"""The budget of failures: what is borne, what is not, and how soon a place is filled again."""

from __future__ import annotations

import asyncio

import pytest

from areal.errors import WorkerFailed
from areal.flow import restarts as restarts_module
from areal.flow.restarts import CALM_S, LONGEST_PAUSE_S, Restarts


class Clock:
    """Invariant: `now` is what the budget reads."""

    now = 1000.0

    def read(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(restarts_module, "_now", made.read)
    return made


async def test_the_clock_is_the_event_loops() -> None:
    before = asyncio.get_running_loop().time()
    assert before <= restarts_module._now() <= asyncio.get_running_loop().time()


def test_one_loss_too_many_within_the_window_ends_the_run_with_a_report(clock: Clock) -> None:
    budget = Restarts(most=2, window_s=100.0, backoff_s=1.0)
    for number in range(2):
        budget.lost(f"engine-{number}", f"signal {number}\nand its log")
        clock.now += 10
    with pytest.raises(WorkerFailed) as caught:
        budget.lost("rollout-0", "signal 2")
    said = str(caught.value)
    assert said.startswith("3 workers were lost within 100 s, more than the 2 that failures.max_restarts allows")
    assert [line.strip() for line in said.splitlines()[1:4]] == [
        "engine-0: signal 0",
        "engine-1: signal 1",
        "rollout-0: signal 2",
    ]
    assert budget.num_lost == 3


def test_losses_that_are_long_ago_are_borne(clock: Clock) -> None:
    budget = Restarts(most=1, window_s=100.0, backoff_s=1.0)
    for number in range(50):
        budget.lost(f"engine-{number}", "again")
        clock.now += 101
    assert budget.num_lost == 50


def test_quick_deaths_in_one_place_wait_longer_and_longer(clock: Clock) -> None:
    budget = Restarts(most=100, window_s=1e9, backoff_s=1.0)
    pauses, quick = [], 0
    for number in range(10):
        name = f"engine-{number}"
        budget.born(name, quick)
        clock.now += 1
        turn = budget.lost(name, "broken")
        pauses.append(turn.pause_s)
        quick = turn.quick
    assert pauses == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    budget.born("engine-10", quick)
    clock.now += CALM_S
    assert budget.lost("engine-10", "an accident").pause_s == 0, "it lived long enough to be in order"


def test_many_deaths_at_once_in_different_places_are_replaced_at_once(clock: Clock) -> None:
    budget = Restarts(most=100, window_s=1e9, backoff_s=1.0)
    for number in range(8):
        budget.born(f"engine-{number}")
    assert {budget.lost(f"engine-{number}", "its node died").pause_s for number in range(8)} == {0.0}


def test_attempts_that_fail_count_only_where_the_run_cannot_go_on_without(clock: Clock) -> None:
    budget = Restarts(most=1, window_s=100.0, backoff_s=1.0)
    turn = budget.lost("engine-0", "its node died")
    for _ in range(20):
        turn = budget.failed(turn, "a new engine", "no room", counts=False)
    assert (turn.pause_s, budget.num_lost) == (LONGEST_PAUSE_S, 1)
    with pytest.raises(WorkerFailed, match="a new engine: no room"):
        budget.failed(turn, "a new engine", "no room", counts=True)
