"""PPO's advantages against the sum that defines them, the critic's loss against its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, agree
from torch import Tensor

from areal.algorithms.advantages import generalized_advantages
from areal.algorithms.ppo import Ppo, PpoOptions, ValueLoss
from areal.contracts.algorithm import RefinesAdvantages, UsesCritic
from areal.contracts.messages import Row

number = st.floats(-3, 3)


@given(st.lists(st.tuples(number, number), max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_generalized_advantages_are_the_discounted_sum_of_errors(
    steps: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    """Equations 11 and 16 of arXiv 1506.02438, written as the double sum."""
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    errors = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < len(steps) else 0.0) - values[t] for t in range(len(steps))
    ]
    advantages, returns = generalized_advantages(rewards, values, gamma=gamma, lam=lam)
    for t in range(len(steps)):
        expected = sum((gamma * lam) ** (later - t) * errors[later] for later in range(t, len(steps)))
        assert advantages[t] == pytest.approx(expected, abs=1e-9)
        assert returns[t] == pytest.approx(expected + values[t], abs=1e-9)


def test_lambda_one_is_reward_to_go_less_value_and_zero_is_one_step() -> None:
    rewards, values = [0.0, 0.0, 1.0], [0.25, 0.5, 0.75]
    advantages, returns = generalized_advantages(rewards, values, gamma=1.0, lam=1.0)
    assert advantages == pytest.approx([0.75, 0.5, 0.25]) and returns == pytest.approx([1.0] * 3)
    advantages, _ = generalized_advantages(rewards, values, gamma=0.5, lam=0.0)
    assert advantages == pytest.approx([0.25 - 0.25, 0.375 - 0.5, 1 - 0.75])


def row(reward: float, values: tuple[float, ...], **more: object) -> Row:
    """Return a row of a prompt token, then trained tokens around one that is not."""
    n = len(values)
    plain = Row(
        token_ids=(1,) * (n + 2),
        loss_mask=(False, True, False, *(True,) * (n - 1)),
        logprobs=(0.0, -1.0, 0.0, *(-1.0,) * (n - 1)),
        versions=(-1, 0, -1, *(0,) * (n - 1)),
        advantages=(0.0, reward, 0.0, *(reward,) * (n - 1)),
        values=(0.0, values[0], 0.0, *values[1:]),
    )
    return replace(plain, **more)


def test_a_rows_reward_comes_with_its_last_token() -> None:
    ppo = Ppo(PpoOptions(scale="none", lam=1.0))
    assert isinstance(ppo, RefinesAdvantages) and isinstance(ppo, UsesCritic)
    (refined,) = ppo.refine([row(2.0, (0.5, 0.25, 1.0))])
    assert refined.advantages == pytest.approx((0.0, 1.5, 0.0, 1.75, 1.0))
    assert refined.returns == pytest.approx((0.0, 2.0, 0.0, 2.0, 2.0))
    masked = row(2.0, (0.5,), loss_mask=(False, False, False))
    assert ppo.refine([masked])[0].returns == (0.0, 0.0, 0.0)


def test_a_penalty_in_the_reward_comes_with_each_token() -> None:
    options = PpoOptions(scale="none", lam=1.0, kl_coefficient=0.5, kl_in="reward", kl_estimator="k1")
    (refined,) = Ppo(options).refine([row(2.0, (0.0, 0.0, 0.0), reference_logprobs=(0.0, -1.5, 0.0, -1.0, -0.6))])
    # Costs 0.25, 0 and -0.2, each paid from its own token back to the first.
    assert refined.returns == pytest.approx((0.0, 2.0 - 0.05, 0.0, 2.2, 2.2))


def test_a_step_is_normalised_after_the_estimate() -> None:
    rows = Ppo().refine([row(1.0, (0.0, 0.0)), row(0.0, (0.0, 0.0))])
    advantages = [a for r in rows for a, trained in zip(r.advantages, r.loss_mask, strict=True) if trained]
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    assert sum(a * a for a in advantages) / 4 == pytest.approx(1, rel=1e-4)
    assert rows[0].returns == pytest.approx((0.0, 0.95, 0.0, 1.0)), "returns are never normalised"


def test_without_values_it_says_who_should_have_given_them() -> None:
    with pytest.raises(ValueError, match="no values; the trainer fills them in"):
        Ppo().refine([replace(row(1.0, (0.0,)), values=None)])


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.2]))
@settings(max_examples=40, deadline=None)
def test_the_critics_loss(seed: int, clip: float | None) -> None:
    case = Case(seed)
    terms: list[Tensor] = []
    for v, old, target in zip(case.current, case.old_values, case.returns, strict=True):
        for t in range(len(v)):
            moved = v[t] if clip is None else torch.clamp(v[t], float(old[t]) - clip, float(old[t]) + clip)
            terms.append(0.5 * torch.maximum((v[t] - target[t]) ** 2, (moved - target[t]) ** 2))
    agree(case, ValueLoss(clip), torch.stack(terms).mean())


def test_a_critic_of_extreme_values_is_finite() -> None:
    case = Case(2, num_sequences=2)
    case.lengths = [1, 1]
    case.current = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (1e4, 0.0)]
    case.proximal = case.behavior = [c.detach() for c in case.current]
    case.fill()
    case.returns = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)]
    case.old_values = [torch.tensor([0.0], dtype=torch.float64)] * 2
    loss, gradient = case.loss(ValueLoss(0.2))
    assert math.isfinite(loss) and gradient[1] == [0.0], "a value that is right learns nothing"
