"""The divergence from a reference, in the loss and in the reward; interpolated proximal logprobs; turn discount."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import VERSION, Case, agree
from pydantic import ValidationError
from torch import Tensor

from areal.algorithms.advantages import discounted_turns
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.gspo import Gspo, GspoOptions
from areal.algorithms.ratios import interpolated, kl_estimate
from areal.contracts.algorithm import Needs
from areal.contracts.messages import Row
from areal.testing.samples import group_of, sampled

seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(["k1", "k2", "k3"])


def estimate(kind: str, current: Tensor, reference: Tensor) -> Tensor:
    """Schulman's three estimators of KL(current || reference)."""
    log_r = current - reference
    return {"k1": log_r, "k2": log_r**2 / 2, "k3": torch.exp(-log_r) - 1 + log_r}[kind]


def surrogate(case: Case, i: int, old: Tensor) -> Tensor:
    r = torch.exp(case.current[i] - old)
    return torch.minimum(r * case.advantage[i], r.clamp(0.8, 1.2) * case.advantage[i])


def weight(old: Tensor, behavior: Tensor) -> Tensor:
    w = torch.exp(old - behavior)
    return torch.where(w > 5, 0.0, w)


@given(seeds, kinds)
@settings(max_examples=40, deadline=None)
def test_in_the_loss(seed: int, kind: Any) -> None:
    """Equation 3 of arXiv 2402.03300 for k3, with a mean over tokens; the correction for stale samples is outside."""
    case = Case(seed)
    terms = [
        weight(p, b) * surrogate(case, i, p) - 0.3 * estimate(kind, case.current[i], case.reference[i])
        for i, (p, b) in enumerate(zip(case.proximal, case.behavior, strict=True))
    ]
    agree(case, Grpo(GrpoOptions(kl_coefficient=0.3, kl_estimator=kind)), -torch.cat(terms).mean())


def test_in_the_loss_of_another_aggregation() -> None:
    case = Case(6, spread=0.01)
    with_kl = case.loss(Gspo(GspoOptions(kl_coefficient=0.3)))[0]
    without = case.loss(Gspo())[0]
    expected = sum(
        float(estimate("k3", c.detach(), r).mean()) for c, r in zip(case.current, case.reference, strict=True)
    )
    assert with_kl - without == pytest.approx(0.3 * expected / 5)


@given(seeds, kinds, st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_packing_changes_nothing(seed: int, kind: Any, cut: int) -> None:
    case, algorithm = Case(seed), Grpo(GrpoOptions(kl_coefficient=0.3, kl_estimator=kind, proximal="loglinear"))
    whole, gradient = case.loss(algorithm)
    parts, in_parts = case.loss(algorithm, range(cut), range(cut, 5))
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    for one, other in zip(gradient, in_parts, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_average_to_the_divergence(kind: Any) -> None:
    """Exactly, over a distribution that can be summed; k2 up to third order."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.21, 0.48, 0.31], dtype=torch.float64)
    divergence = float((p * (p / q).log()).sum())
    found = float((p * kl_estimate(q.log(), p.log(), kind)).sum())
    assert found == pytest.approx(divergence, rel=0.02 if kind == "k2" else 1e-9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_extreme_logprobs_are_finite(kind: Any) -> None:
    values = torch.tensor([-math.inf, -1e4, -1.0, 0.0], dtype=torch.float64)
    for other in values:
        current = values.clone().requires_grad_()
        found = kl_estimate(other.expand(4), current, kind)
        (slopes,) = torch.autograd.grad(found.sum(), current)
        assert found.isfinite().all() and slopes.isfinite().all()


def row(advantages: tuple[float, ...], logprobs: tuple[float, ...], reference: tuple[float, ...]) -> Row:
    n = len(advantages)
    return Row(
        token_ids=(1,) * (n + 1),
        loss_mask=(False,) + (True,) * n,
        logprobs=(0.0, *logprobs),
        versions=(-1,) + (0,) * n,
        advantages=(0.0, *advantages),
        reference_logprobs=(0.0, *reference),
    )


def test_in_the_reward_each_token_pays_for_all_that_follow() -> None:
    options = GrpoOptions(kl_coefficient=0.5, kl_in="reward", kl_estimator="k1")
    algorithm = Grpo(options)
    assert algorithm.needs == Needs(advantage=True, reference="actor@0"), "no row is needed for the loss alone"
    (refined,) = algorithm.refine([row((1.0, 1.0), (-1.0, -2.0), (-1.4, -1.0))])
    # Costs 0.2 and -0.5.
    assert refined.advantages == pytest.approx((0.0, 1.3, 1.5))
    case = Case(1)
    assert case.loss(algorithm) == case.loss(Grpo()), "and the loss has none"
    with pytest.raises(ValueError, match="no reference_logprobs"):
        algorithm.refine([Row(token_ids=(1,), loss_mask=(False,), logprobs=(0.0,), versions=(-1,), advantages=(0.0,))])


@pytest.mark.parametrize("ref", ["", "actor@7", "actor@"])
def test_references_that_cannot_be(ref: str) -> None:
    with pytest.raises(ValidationError, match="names no reference policy; write actor@0, an HF folder or a hub id"):
        GrpoOptions(ref=ref)


def test_a_reward_has_the_estimator_whose_expected_gradient_is_the_divergences() -> None:
    """Over a distribution that can be summed: E[-cost * grad log pi] is minus the gradient of KL(pi || ref)."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    pi = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)
    algorithm = Grpo(GrpoOptions(kl_coefficient=1.0, kl_in="reward"))
    rows = [row((0.0,), (lp,), (r,)) for lp, r in zip(pi.tolist(), ref.tolist(), strict=True)]
    advantages = torch.tensor([refined.advantages[1] for refined in algorithm.refine(rows)], dtype=torch.float64)
    (found,) = torch.autograd.grad(-(pi.exp().detach() * advantages * pi).sum(), logits)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


def test_what_is_needed() -> None:
    assert Grpo().needs == Needs()
    assert Grpo(GrpoOptions(kl_coefficient=0.1, ref="some/model")).needs == Needs(
        advantage=False, reference="some/model"
    )
    assert not Grpo(GrpoOptions(proximal="loglinear")).needs.proximal
    assert not Grpo(GrpoOptions(objective="naive")).needs.proximal


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_loglinear_proximal_logprobs(seed: int) -> None:
    """A-3PO, arXiv 2512.06547: a token sampled by these weights has its own logprob, older ones lie between."""
    case = Case(seed)
    terms = []
    for i, (c, b, versions) in enumerate(zip(case.current, case.behavior, case.versions, strict=True)):
        alpha = torch.tensor([(VERSION - v) / (VERSION + 1 - v) for v in versions], dtype=torch.float64)
        old = b + alpha * (c.detach() - b)
        terms.append(weight(old, b) * surrogate(case, i, old))
    algorithm = Grpo(GrpoOptions(proximal="loglinear"))
    agree(case, algorithm, -torch.cat(terms).mean())
    case.first_update = True
    assert case.loss(algorithm) == case.loss(Grpo()), "before the first update the real ones are there for nothing"


def test_interpolation_at_its_ends() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -math.inf], requires_grad=True)
    behavior, versions = torch.tensor([-2.0, -2.0, -2.0, -math.inf]), torch.tensor([7, 6, 9, 5])
    found = interpolated(current, behavior, versions, 7)
    assert found.tolist() == [-2.0, -1.5, -2.0, -math.inf] and not found.requires_grad


def test_turns_long_before_the_reward_count_less() -> None:
    assert discounted_turns(2.0, [2, 0, 1], 0.5) == [0.5, 0.5, 2.0]
    assert discounted_turns(2.0, [], 0.5) == []

    pair = group_of([sampled(1.0, 1, 2, sample=0), sampled(0.0, 1, 2, sample=1)])
    discounted = Grpo(GrpoOptions(scale="none", turn_discount=0.5)).advantages(pair)
    assert discounted == [[0.25, 0.5, 0.5], [-0.25, -0.5, -0.5]]
