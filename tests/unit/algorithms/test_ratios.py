"""Ratios are exact where they can be and finite where they cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areal.algorithms.ratios import LOG_RATIO_LIMIT, behavior_weight, kl_estimate, log_ratio, ratio

INF = math.inf


def test_extreme_logprobs_have_finite_ratios_and_no_gradient() -> None:
    new = torch.tensor([-INF, -INF, 0.0, -100.0, 0.0, -1.0], requires_grad=True)
    old = torch.tensor([-INF, -1.0, -INF, 0.0, -100.0, -1.5])
    found = log_ratio(new, old)
    limit = LOG_RATIO_LIMIT
    assert found.tolist() == [0.0, -limit, limit, -limit, limit, 0.5]
    (gradient,) = torch.autograd.grad(ratio(new, old).sum(), new)
    assert gradient.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, pytest.approx(math.exp(0.5))]


def test_behavior_weights_are_capped_or_dropped_and_carry_no_gradient() -> None:
    proximal = torch.tensor([-1.0, -1.0, -3.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-1.0, -3.0, -1.0, -INF])
    one: dict[str, Any] = {"sequence": torch.zeros(4, dtype=torch.int64), "num_sequences": 1}
    clamped = behavior_weight(proximal, behavior, cap=5.0, mode="clamp", **one)
    masked = behavior_weight(proximal, behavior, cap=5.0, mode="mask", **one)
    assert clamped.tolist() == pytest.approx([1.0, 5.0, math.exp(-2), 5.0])
    assert masked.tolist() == pytest.approx([1.0, 0.0, math.exp(-2), 0.0])
    assert not clamped.requires_grad and not masked.requires_grad


def test_the_kl_estimate_is_never_negative_and_right_on_average() -> None:
    torch.manual_seed(0)
    old, new = (torch.randn(2, 9).double() * 0.5).log_softmax(-1)
    # The mean over tokens drawn from `old`, exactly: weighted by their probabilities.
    estimate = kl_estimate(new, old)
    assert float(estimate.min()) >= 0
    assert float((old.exp() * estimate).sum()) == pytest.approx(float((old.exp() * (old - new)).sum()), rel=1e-9)
    assert kl_estimate(old, old).tolist() == [0.0] * 9
