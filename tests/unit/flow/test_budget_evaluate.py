"""The budget of failed episodes, and evaluation through the same crew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from flow_samples import handle_of, make_prompt, make_trajectory

from areal.contracts.messages import Outcome
from areal.errors import RewardBudgetExceeded, WorkerFailed
from areal.flow.rollout import crew as crew_module
from areal.flow.rollout import evaluate as evaluation
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.worker import GroupRequest, Part

OK = Outcome.scored(0.0)


def count(budget: FailureBudget, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        budget.count(outcome)


def test_a_full_window_with_too_many_failures_ends_the_run() -> None:
    budget = FailureBudget(max_share=0.5, window=4)
    count(budget, Outcome.timeout("slow"), Outcome.error("x"), Outcome.error("y"))
    with pytest.raises(
        RewardBudgetExceeded,
        match=r"^4 of the last 4 episodes gave no reward, more than the 50% that rollout.max_failed_share allows; "
        r"the first was timeout: slow$",
    ):
        budget.count(Outcome.error("z"))


def test_the_share_itself_is_allowed() -> None:
    budget = FailureBudget(max_share=0.5, window=4)
    count(budget, *[OK, Outcome.error("x")] * 20)
    with pytest.raises(RewardBudgetExceeded, match="3 of the last 4"):
        budget.count(Outcome.error("one more"))


def test_old_failures_leave_the_window_but_the_first_text_stays() -> None:
    budget = FailureBudget(max_share=0.0, window=3)
    count(budget, Outcome.error("the very first"), OK)  # not a full window yet
    with pytest.raises(RewardBudgetExceeded, match=r"1 of the last 3 .* the 0% .* error: the very first"):
        budget.count(OK)
    count(budget, OK, OK)
    with pytest.raises(RewardBudgetExceeded, match="the first was error: the very first"):
        budget.count(Outcome.timeout("later"))


def test_zero_rewards_are_no_failures() -> None:
    count(FailureBudget(max_share=0.0, window=2), *[OK] * 10)


def test_prompts_are_spread_over_the_environments() -> None:
    there = {"a": {"train": 9, "test": 100}, "b": {"train": 9, "test": 2}, "c": {"train": 9, "test": 0}}
    chosen = evaluation.some_prompts(there, "test", 7)
    assert chosen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert evaluation.some_prompts(there, "test", 1000) == [
        *chosen[:4],
        *(("a", index) for index in range(2, 100)),
    ]
    assert evaluation.some_prompts({"c": {"train": 1, "test": 0}}, "test", 5) == []


class Player:
    """Fails the first attempt at each prompt. Invariant: `asked` holds every request."""

    def __init__(self) -> None:
        self.asked: list[GroupRequest] = []

    def start(self) -> dict[str, dict[str, int]]:
        return {}

    async def use_engines(self, handles: object) -> None: ...

    async def run_group(self, request: GroupRequest) -> AsyncIterator[Part]:
        first = request.number not in [asked.number for asked in self.asked]
        self.asked.append(request)
        yield make_prompt(request.prompt_index, request.environment)
        await asyncio.sleep(0)
        if first:
            raise WorkerFailed("not this time")
        yield make_trajectory(request.number, 0, reward=request.prompt_index / 4)


async def test_each_test_prompt_is_played_once_and_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "RETRY_PAUSE_S", 0.001)
    player = Player()

    async def spawn(name: str) -> object:
        return handle_of(name, player)

    crew = Crew(spawn, 5.0)  # type: ignore[arg-type]
    await crew.add()
    prompts = [("a", 0), ("b", 0), ("a", 3)]
    groups = await asyncio.wait_for(evaluation.evaluate(crew, prompts), 10)
    assert [(group.prompt.environment, group.prompt.index) for group in groups] == prompts
    assert [group.trajectories[0].outcome.reward for group in groups] == [0.0, 0.0, 0.75]
    assert [group.number for group in groups] == [-1, -2, -3], "never the number of a training group"
    assert all(asked.greedy and asked.split == "test" and asked.samples == (0,) for asked in player.asked)
    assert len(player.asked) == 6
