"""Engine against trainer: the figures, the bounds, the sentence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from flow_samples import make_turn

from areal.contracts.messages import Row
from areal.flow.trainer.parity import Bounds, compared
from areal.flow.trainer.rows import row_of


def row(*logprobs: float) -> Row:
    return row_of(replace(make_turn((1,), (2,) * len(logprobs)), logprobs=logprobs))


def test_mean_maximum_and_divergence() -> None:
    figures = compared([row(-1.0, -2.0), row(-0.5)], [(9.0, -1.1, -1.7), (9.0, -0.5)])
    assert figures["parity/tokens"] == 3
    assert figures["parity/mean"] == pytest.approx(0.4 / 3)
    assert figures["parity/max"] == pytest.approx(0.3)
    expected = (math.exp(-0.1) - 1 + 0.1 + math.exp(0.3) - 1 - 0.3) / 3
    assert figures["parity/kl"] == pytest.approx(expected)


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_what_is_no_probability_is_a_large_difference(odd: float) -> None:
    figures = compared([row(-1.0)], [(0.0, odd)])
    assert figures["parity/mean"] == 20.0
    assert Bounds(mean=1.0, kl=1.0).broken_by(figures)
    assert compared([row(-math.inf)], [(0.0, -math.inf)])["parity/mean"] == 0.0


def test_no_tokens_have_no_figure() -> None:
    assert compared([], []) == {"parity/tokens": 0.0}
    assert Bounds(mean=1e-9, kl=1e-9).broken_by({"parity/tokens": 0.0}) == ""


@pytest.mark.parametrize(("mean", "kl", "is_broken"), [(0.04, 0.01, False), (0.06, 0.01, True), (0.04, 0.03, True)])
def test_either_bound_is_enough(mean: float, kl: float, is_broken: bool) -> None:
    said = Bounds(mean=0.05, kl=0.02).broken_by({"parity/mean": mean, "parity/kl": kl, "parity/tokens": 7.0})
    assert bool(said) == is_broken
    if said:
        assert "over 7 tokens" in said and "temperature" in said and "chat template" in said and "\n" not in said
