"""DPO's loss and gradient against its formula, and what makes a pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, agree
from pydantic import ValidationError
from torch import Tensor

from areal.algorithms.dpo import Dpo, DpoOptions
from areal.contracts.algorithm import Algorithm, Needs
from areal.contracts.messages import Group
from areal.testing.samples import group_of, sampled

seeds = st.integers(0, 2**32 - 1)


def pairs(seed: int) -> Case:
    """Return three pairs, better answers first and worse ones first."""
    case = Case(seed, num_sequences=6)
    case.advantage = [1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    return case


def margins(case: Case) -> list[Tensor]:
    gained = [(c - r).sum() for c, r in zip(case.current, case.reference, strict=True)]
    return [case.advantage[i] * (gained[i] - gained[i + 1]) for i in (0, 2, 4)]


@given(seeds, st.sampled_from([0.1, 1.0]), st.sampled_from([0.0, 0.1]))
@settings(max_examples=40, deadline=None)
def test_the_logistic_loss(seed: int, beta: float, smoothing: float) -> None:
    """Equation 7 of arXiv 2305.18290."""
    case = pairs(seed)
    terms = []
    for m in margins(case):
        right, wrong = 1 / (1 + torch.exp(-beta * m)), 1 / (1 + torch.exp(beta * m))
        terms.append(-(1 - smoothing) * torch.log(right) - smoothing * torch.log(wrong))
    agree(case, Dpo(DpoOptions(beta=beta, label_smoothing=smoothing)), torch.stack(terms).mean())


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_the_squared_loss(seed: int) -> None:
    """Equation 17 of arXiv 2310.12036."""
    case = pairs(seed)
    agree(case, Dpo(DpoOptions(preference="ipo", beta=0.5)), torch.stack([(m - 1) ** 2 for m in margins(case)]).mean())


@given(seeds, st.sampled_from([2, 4]))
@settings(max_examples=10, deadline=None)
def test_packing_changes_nothing_as_long_as_pairs_stay_whole(seed: int, cut: int) -> None:
    case = pairs(seed)
    whole, gradient = case.loss(Dpo())
    parts, in_parts = case.loss(Dpo(), range(cut), range(cut, 6))
    assert parts == pytest.approx(whole, rel=1e-9)
    for one, other in zip(gradient, in_parts, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_half_a_pair_and_no_pair_teach_nothing() -> None:
    case = Case(4, num_sequences=4)
    case.advantage, case.groups = [1.0, 0.0, 0.0, -1.0], [0, 0, 1, 1]
    loss, gradient = case.loss(Dpo())
    assert loss == 0.0 and all(slope == 0.0 for slopes in gradient for slope in slopes)


def test_an_answer_of_several_rows_counts_as_one() -> None:
    """A conversation whose turns do not continue each other: its rows' gains add up."""
    case = Case(5, num_sequences=3)
    case.advantage, case.groups = [1.0, 1.0, -1.0], [0, 0, 0]
    gained = [(c - r).sum() for c, r in zip(case.current, case.reference, strict=True)]
    margin = gained[0] + gained[1] - gained[2]
    agree(case, Dpo(), -torch.log(1 / (1 + torch.exp(-0.1 * margin))))


@pytest.mark.parametrize("current", [-math.inf, -1e4, 0.0])
def test_extreme_tokens_are_finite(current: float) -> None:
    case = Case(2, num_sequences=2)
    case.lengths, case.advantage = [1, 1], [1.0, -1.0]
    case.current = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (current, -1.0)]
    case.proximal = case.behavior = [c.detach() for c in case.current]
    case.fill()
    loss, gradient = case.loss(Dpo())
    assert math.isfinite(loss) and all(math.isfinite(x) for slopes in gradient for x in slopes)


def group(*rewards: float | None, silent: tuple[int, ...] = ()) -> Group:
    return group_of([sampled(reward, int(i not in silent), sample=i) for i, reward in enumerate(rewards)])


@pytest.mark.parametrize(
    ("given", "signs"),
    [
        (group(0.5, None, 1.0, 0.0), [0.0, 0.0, 1.0, -1.0]),
        (group(1.0, 1.0, 0.0, 0.0), [1.0, 0.0, -1.0, 0.0]),
        (group(1.0, 1.0), [0.0, 0.0]),
        (group(None, 1.0), [0.0, 0.0]),
        (group(1.0, 0.0, 0.5, silent=(0,)), [0.0, -1.0, 1.0]),
        (group(), []),
    ],
)
def test_the_best_and_the_worst_are_a_pair(given: Group, signs: list[float]) -> None:
    assert Dpo().advantages(given) == signs


def test_what_it_needs() -> None:
    dpo: Any = Dpo(DpoOptions(ref="somewhere/else"))
    assert isinstance(dpo, Algorithm)
    assert dpo.needs == Needs(proximal=False, reference="somewhere/else", whole_groups=True)
    with pytest.raises(ValidationError):
        DpoOptions(label_smoothing=0.5)
