"""The learning rate at the corners of its shape."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from areal.algorithms.update.schedule import learning_rate
from areal.contracts.specs import TrainingSpec

PEAK = 2e-4


def rates(**numbers: object) -> list[float]:
    training = TrainingSpec(learning_rate=PEAK, max_steps=10, **numbers)  # type: ignore[arg-type]
    return [learning_rate(training, update) for update in range(30)]


def test_constant_stays_after_the_warm_up() -> None:
    assert rates() == [PEAK] * 30
    assert rates(lr_warmup_steps=4) == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4] + [PEAK] * 27)


def test_linear_falls_evenly_to_its_share_at_the_last_update() -> None:
    found = rates(schedule="linear", min_lr_ratio=0.1)
    assert (found[0], found[9]) == (PEAK, pytest.approx(0.1 * PEAK))
    assert [a - b for a, b in pairwise(found[:10])] == pytest.approx([0.1 * PEAK] * 9)
    assert found[10:] == pytest.approx([0.1 * PEAK] * 20)


def test_cosine_is_half_a_cosine_over_all_updates_after_the_warm_up() -> None:
    found = rates(schedule="cosine", min_lr_ratio=0.0, minibatches=2, lr_warmup_steps=3)
    assert found[2:4] == pytest.approx([PEAK, PEAK])
    assert found[3:20] == pytest.approx([PEAK * (1 + math.cos(math.pi * k / 16)) / 2 for k in range(17)])
    assert found[19:] == pytest.approx([0.0] * 11)


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    found = rates(schedule="linear", lr_warmup_steps=30)
    assert found == pytest.approx([PEAK * (k + 1) / 30 for k in range(30)])
