"""Group advantages against the formula, and where there is nothing to compare."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.algorithms.advantages import EPS, group_advantages, normalized, overlong_penalty

rewards_of_a_group = st.lists(st.none() | st.floats(-100, 100), max_size=12)


@given(rewards_of_a_group, st.booleans(), st.floats(0, 2))
def test_it_is_the_literal_formula(rewards: list[float | None], normalize: bool, floor: float) -> None:
    found = group_advantages(rewards, divide_by_std=normalize, std_floor=floor)
    known = numpy.array([reward for reward in rewards if reward is not None], dtype=numpy.float64)
    assert len(found) == len(rewards)
    for reward, advantage in zip(rewards, found, strict=True):
        if reward is None or len(known) < 2 or numpy.ptp(known) == 0:
            assert advantage == 0
            continue
        scale = max(known.std(ddof=1), floor) + EPS if normalize else 1.0
        # Rewards that differ in their last digits only: what is left is rounding.
        assert advantage == pytest.approx((reward - known.mean()) / scale, rel=1e-6, abs=1e-6)


def test_samples_without_reward_change_nothing_for_the_others() -> None:
    assert group_advantages([1.0, None, 0.0, None]) == [
        pytest.approx(math.sqrt(0.5), rel=1e-5),
        0.0,
        pytest.approx(-math.sqrt(0.5), rel=1e-5),
        0.0,
    ]


def test_equal_rewards_give_exactly_nothing() -> None:
    # 0.1 has no exact binary form: the mean of many may differ from it in the last digit.
    assert group_advantages([0.1] * 7) == [0.0] * 7
    assert group_advantages([3.0]) == [0.0]
    assert group_advantages([]) == []


def test_a_floor_tames_groups_that_are_nearly_equal() -> None:
    rewards = [1.0] * 15 + [0.0]
    assert min(group_advantages(rewards)) < -3.7
    assert min(group_advantages(rewards, std_floor=0.5)) == pytest.approx(-15 / 16 / 0.5, rel=1e-5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_leave_one_out_is_the_literal_formula(rewards: list[float]) -> None:
    found = group_advantages(rewards, baseline="leave_one_out", divide_by_std=False)
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected = 0.0 if min(rewards) == max(rewards) else reward - sum(others) / len(others)
        assert found[i] == pytest.approx(expected, abs=1e-9)


# No value so small that dividing it gives 0.
values_of_a_step = st.lists(st.floats(-10, 10).map(lambda value: round(value, 6)), min_size=1, max_size=20)


@given(values_of_a_step, st.booleans())
def test_normalized_values_have_deviation_1(values: list[float], center: bool) -> None:
    found = numpy.array(normalized(values, center=center))
    if max(values) - min(values) < 1e-3:
        assert numpy.isfinite(found).all()
        return
    assert found.std() == pytest.approx(1, rel=1e-2)
    if center:
        assert found.mean() == pytest.approx(0, abs=1e-6)
    else:
        assert [value == 0 for value in found] == [value == 0 for value in values], "zero stays zero"


def test_the_penalty_of_long_answers() -> None:
    penalties = [overlong_penalty(n, limit=100, buffer=20) for n in (0, 80, 85, 100, 101)]
    assert penalties == [0.0, 0.0, -0.25, -1.0, -1.0]
