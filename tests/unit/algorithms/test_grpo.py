"""GRPO's loss and gradient against the paper's formulas, token by token, with derivatives written out."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.contracts.algorithm import Algorithm, TokenBatch
from areal.contracts.messages import Completion, Group, Outcome, Prompt, Trajectory

INF = math.inf


def token_batch(
    behavior: list[float],
    proximal: list[float],
    advantages: list[float],
    entropy: list[float] | None = None,
    total: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> TokenBatch:
    size = len(behavior)
    return TokenBatch(
        behavior_logprobs=torch.tensor(behavior, dtype=dtype),
        proximal_logprobs=torch.tensor(proximal, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        versions=torch.zeros(size, dtype=torch.int64),
        version=0,
        first_update=True,
        sequence=torch.zeros(size, dtype=torch.int64),
        num_sequences=1,
        group=torch.zeros(1, dtype=torch.int64),
        entropy=torch.tensor(entropy or [0.0] * size, dtype=dtype, requires_grad=True),
        total_tokens=total or size,
        total_sequences=1,
        computed_tokens=size,
        computed_groups=1,
    )


def literal_token(
    current: float, behavior: float, proximal: float, advantage: float, options: GrpoOptions
) -> tuple[float, float, bool]:
    """Return (loss, derivative by the logprob, whether clipping bit) of one token: plain Python, case by case."""
    decoupled = options.objective == "decoupled"
    r = math.exp(current - (proximal if decoupled else behavior))
    weight = 1.0
    if decoupled:
        weight = math.exp(proximal - behavior)
        if weight > options.behavior_cap:
            weight = options.behavior_cap if options.behavior_mode == "clamp" else 0.0
    low, high = 1 - options.clip_low, 1 + options.clip_high
    # Where the smaller of the two branches is the clipped one there is no gradient.
    clipped = (advantage > 0 and r > high) or (advantage < 0 and r < low)
    bound = min(max(r, low), high)
    value = bound * advantage if clipped else r * advantage
    if options.dual_clip is not None and advantage < 0 and value < options.dual_clip * advantage:
        value, clipped = options.dual_clip * advantage, True
    return -weight * value, 0.0 if clipped else -weight * r * advantage, clipped


logprob = st.floats(-4, -0.01)
# No advantage so small that its product with a ratio vanishes: there both sides of the clip are equal.
advantage = st.floats(-3, 3).map(lambda value: round(value, 3))
tokens = st.lists(st.tuples(logprob, logprob, logprob, advantage), min_size=1, max_size=20)
some_options = st.builds(
    GrpoOptions,
    clip_low=st.sampled_from([0.0, 0.2, 1.0]),
    clip_high=st.sampled_from([0.0, 0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    objective=st.sampled_from(["decoupled", "naive"]),
    behavior_cap=st.sampled_from([1.5, 5.0, 1e6]),
    behavior_mode=st.sampled_from(["clamp", "mask"]),
    entropy_coefficient=st.sampled_from([0.0, 0.1]),
)


@given(tokens, some_options, st.integers(1, 100))
@settings(max_examples=150)
def test_loss_and_gradient_are_the_literal_ones(
    tokens: list[tuple[float, float, float, float]], options: GrpoOptions, more: int
) -> None:
    currents, behaviors, proximals, advantages = ([*column] for column in zip(*tokens, strict=True))
    total = len(tokens) + more
    entropy = [0.1 * i for i in range(len(tokens))]
    batch = token_batch(behaviors, proximals, advantages, entropy, total)
    logprobs = torch.tensor(currents, dtype=torch.float64, requires_grad=True)
    loss, stats = Grpo(options).loss(logprobs, batch)
    loss.backward()

    expected = [literal_token(*token, options) for token in tokens]
    bonus = options.entropy_coefficient
    assert float(loss.detach()) == pytest.approx(
        (sum(value for value, _, _ in expected) - bonus * sum(entropy)) / total, abs=1e-9, rel=1e-6
    )
    gradient = [slope / total for _, slope, _ in expected]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-9, rel=1e-6)
    if bonus:
        assert batch.entropy.grad is not None
        assert batch.entropy.grad.tolist() == pytest.approx([-bonus / total] * len(tokens))
    assert float(stats["clip_fraction"]) == pytest.approx(sum(hit for _, _, hit in expected) / len(tokens))


def test_on_policy_it_is_the_policy_gradient() -> None:
    """With all three policies equal, the gradient is -A/N whatever the clip range."""
    for options in (GrpoOptions(), GrpoOptions(objective="naive"), GrpoOptions(clip_low=0.0, clip_high=0.0)):
        same, advantages = [-1.0, -0.5, -2.0], [1.0, -2.0, 0.5]
        logprobs = torch.tensor(same, dtype=torch.float64, requires_grad=True)
        loss, stats = Grpo(options).loss(logprobs, token_batch(same, same, advantages))
        loss.backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx([-a / 3 for a in advantages])
        assert {name: float(value) for name, value in stats.items()} == pytest.approx(
            {
                "clip_fraction": 0,
                "behavior_weight": 1,
                "behavior_dropped": 0,
                "behavior_kl": 0,
                "entropy": 0,
                "behavior_weight_max": 1,
            }
        )


def test_statistics_are_means_over_the_computed_tokens() -> None:
    behavior, proximal = [-1.0, -1.0], [-1.0, -1.0 + math.log(3)]
    batch = replace(token_batch(behavior, proximal, [1.0, 1.0], [0.5, 1.5], total=8), computed_tokens=4)
    stats = Grpo(GrpoOptions()).loss(batch.proximal_logprobs, batch)[1]
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {
            "clip_fraction": 0,
            "behavior_weight": 4 / 4,
            "behavior_dropped": 0,
            "behavior_kl": (3 - 1 - math.log(3)) / 4,
            "entropy": 2 / 4,
            "behavior_weight_max": 3,
        }
    )


def test_dropped_tokens_still_count_in_the_mean() -> None:
    """Two tokens, one dropped: the other's gradient is divided by two."""
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss, _ = Grpo(GrpoOptions(behavior_cap=2.0)).loss(logprobs, token_batch([-1.0, -9.0], [-1.0] * 2, [1.0] * 2))
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("current", "behavior", "proximal", "advantage"),
    [
        (-INF, -INF, -INF, 1.0),
        (-1.0, -INF, -1.0, 1.0),
        (-1.0, -1.0, -INF, -1.0),
        (-INF, -1.0, -1.0, -1.0),
        (-1e4, -1.0, -1e-9, 1.0),
        (0.0, -1e4, -1e4, 0.0),
        (-1.0, -1.0, -1.0, 0.0),
    ],
)
@pytest.mark.parametrize("objective", ["decoupled", "naive"])
def test_extreme_tokens_are_finite(
    current: float, behavior: float, proximal: float, advantage: float, objective: Any
) -> None:
    logprobs = torch.tensor([current], requires_grad=True)
    batch = token_batch([behavior], [proximal], [advantage], dtype=torch.float32)
    loss, stats = Grpo(GrpoOptions(objective=objective)).loss(logprobs, batch)
    loss.backward()
    assert logprobs.grad is not None
    assert bool(loss.isfinite()) and bool(logprobs.grad.isfinite().all())
    assert all(bool(value.isfinite()) for value in stats.values())
    if advantage == 0:
        assert (float(loss.detach()), logprobs.grad.tolist()) == (0.0, [0.0])


def test_when_every_token_is_dropped_there_is_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = token_batch([-9.0, -9.0], [-1.0, -1.0], [1.0, -1.0], dtype=torch.float32)
    loss, _ = Grpo(GrpoOptions()).loss(logprobs, batch)
    loss.backward()
    assert logprobs.grad is not None
    assert (float(loss.detach()), logprobs.grad.tolist()) == (0.0, [0.0, 0.0])


def group(*outcomes: Outcome) -> Group:
    turn = Completion(uid="", prompt_ids=(1,), token_ids=(5,), logprobs=(-1.0,), versions=(0,), finish_reason="stop")
    prompt = Prompt(environment="e", index=0, messages=())
    trajectories = [Trajectory(group=0, sample=i, turns=(turn,), outcome=o) for i, o in enumerate(outcomes)]
    return Group(number=0, prompt=prompt, trajectories=tuple(trajectories))


def test_failures_are_not_rewards_of_zero() -> None:
    outcomes = (Outcome.scored(1.0), Outcome.timeout("slow"), Outcome.scored(0.5), Outcome.error("broken"))
    assert Grpo(GrpoOptions(scale="none")).advantages(group(*outcomes)) == [0.25, 0.0, -0.25, 0.0]
    floor = Grpo(GrpoOptions(std_floor=0.5)).advantages(group(*outcomes))
    assert floor == [pytest.approx(0.5, rel=1e-5), 0.0, pytest.approx(-0.5, rel=1e-5), 0.0]
    assert Grpo().advantages(group(Outcome.error("a"), Outcome.scored(7.0))) == [0.0, 0.0]


def test_it_travels_and_says_what_it_needs() -> None:
    plain, bonus = Grpo(), Grpo(GrpoOptions(entropy_coefficient=0.01))
    assert isinstance(plain, Algorithm)
    # With a bonus, tokens without advantage have a gradient.
    assert (plain.needs.advantage, bonus.needs.advantage) == (True, False)
    assert pickle.loads(pickle.dumps(bonus)).options == bonus.options


def test_impossible_options_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"behavior_cap": 0},
        {"objective": "ppo"},
        {"std_floor": -1},
        {"scale": "std"},
        {"baseline": "critic"},
        {"clip": 0.2},
    ]
    for table in wrong:
        with pytest.raises(ValidationError):
            GrpoOptions.model_validate(table)
