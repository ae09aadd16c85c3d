"""What travels between the stages keeps its promises."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from areal.contracts.environment import Reply
from areal.contracts.messages import (
    Completion,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    Row,
    Sampling,
    Trajectory,
)


def turn(*versions: int) -> Completion:
    size = len(versions)
    return Completion(
        uid="u",
        prompt_ids=(1,),
        token_ids=(2,) * size,
        logprobs=(-1.0,) * size,
        versions=versions,
        finish_reason="stop",
    )


@pytest.mark.parametrize("reward", [0.0, -2.5, 1, True])
def test_finite_rewards_are_ok(reward: float) -> None:
    outcome = Outcome.scored(reward, accuracy=0.5)
    assert (outcome.status, outcome.reward, outcome.metrics) == ("ok", float(reward), {"accuracy": 0.5})
    assert type(outcome.reward) is float


@pytest.mark.parametrize(
    ("reward", "detail"),
    [
        (float("nan"), "the reward is nan"),
        (float("inf"), "the reward is inf"),
        (float("-inf"), "the reward is -inf"),
        ("x", "the reward 'x' is not a number"),
        (None, "the reward None is not a number"),
        ([1.0], r"the reward [1.0] is not a number"),
    ],
)
def test_anything_else_is_an_error_and_never_0(reward: Any, detail: str) -> None:
    assert Outcome.scored(reward, accuracy=1.0) == Outcome(status="error", detail=detail)


def test_failures_carry_no_reward() -> None:
    assert Outcome.error("why") == Outcome(status="error", reward=None, detail="why")
    assert Outcome.timeout("when") == Outcome(status="timeout", reward=None, detail="when")


def test_a_trajectory_counts_tokens_and_versions() -> None:
    trajectory = Trajectory(group=3, sample=2, turns=(turn(5, 5), turn(), turn(4, 6)), outcome=Outcome.scored(1))
    assert (trajectory.uid, trajectory.num_tokens, trajectory.min_version) == ("3/2", 4, 4)
    assert Trajectory(group=0, sample=0, turns=(turn(),), outcome=Outcome.error("x")).min_version is None


def test_messages_are_frozen_and_pickle() -> None:
    trajectory = Trajectory(group=0, sample=0, turns=(turn(1),), outcome=Outcome.scored(0.1, a=1.0))
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory
    with pytest.raises(FrozenInstanceError):
        trajectory.group = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Sampling(128)  # type: ignore[misc]


def test_a_row_with_other_proximal_logprobs() -> None:
    row = Row(
        token_ids=(1, 2),
        loss_mask=(False, True),
        logprobs=(0.0, -1.0),
        versions=(-1, 0),
        advantages=(0.0, 1.0),
    )
    assert row.num_loss_tokens == 1 and row.proximal_logprobs is None
    assert row.with_proximal((0.0, -2.0)).proximal_logprobs == (0.0, -2.0)


@pytest.mark.parametrize(("reason", "finished"), [("stop", True), ("length", False), ("interrupted", False)])
def test_a_reply_is_finished_by_the_model_alone(reason: Any, finished: bool) -> None:
    completion = Completion(
        uid="u", prompt_ids=(1,), token_ids=(2,), logprobs=(0.0,), versions=(0,), finish_reason=reason
    )
    assert Reply(text="x", completion=completion).finished is finished


@dataclass(frozen=True, kw_only=True)
class Harder(Prompt):
    """A plugin's prompt with a field of its own."""

    difficulty: float = 0.0


def test_messages_travel_whole() -> None:
    prompt = Prompt(environment="e", index=3, messages=({"role": "user", "content": "?"},), answer="4")
    turn = Completion(
        uid="0/0/0", prompt_ids=(1,), token_ids=(2,), logprobs=(-0.5,), versions=(7,), finish_reason="stop"
    )
    trajectory = Trajectory(group=0, sample=1, turns=(turn,), outcome=Outcome.scored(0.5, accuracy=1.0))
    request = GenerateRequest(uid="0/0/0", prompt_ids=(1,), sampling=Sampling(top_k=3), seed=5)
    harder = Harder(environment="e", index=1, messages=(), difficulty=0.75)
    for message in (prompt, request, Group(number=0, prompt=prompt, trajectories=(trajectory,)), harder):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(message, protocol)) == message
        assert copy.deepcopy(message) == message
