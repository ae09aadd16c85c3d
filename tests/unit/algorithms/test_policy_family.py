"""Each algorithm's loss and gradient against the formula of its paper, written out literally in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, agree
from pydantic import ValidationError
from torch import Tensor

from areal.algorithms.cispo import Cispo, CispoOptions
from areal.algorithms.dapo import Dapo, DapoOptions
from areal.algorithms.dr_grpo import DrGrpo, DrGrpoOptions
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.gspo import Gspo, GspoOptions
from areal.algorithms.lite_ppo import LitePpo
from areal.algorithms.ppo import Ppo
from areal.algorithms.reinforce import Reinforce, ReinforcePlusPlus
from areal.algorithms.rloo import Rloo
from areal.algorithms.sapo import Sapo, SapoOptions
from areal.contracts.algorithm import Algorithm, RefinesAdvantages, SelectsGroups
from areal.contracts.messages import Group, Row
from areal.testing.samples import group_of, sampled

ALL: list[Callable[[], Any]] = [
    Grpo, DrGrpo, Dapo, Gspo, Cispo, Sapo, Rloo, Reinforce, ReinforcePlusPlus, LitePpo, Ppo
]  # fmt: skip


def weight(proximal: Tensor, behavior: Tensor, cap: float = 5.0) -> Tensor:
    w = (proximal - behavior).exp()
    return torch.where(w > cap, torch.zeros_like(w), w)


def ppo(r: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(r * advantage, torch.clamp(r, 1 - low, 1 + high) * advantage)


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_dr_grpo(seed: int) -> None:
    """Equation of section 3.2: a sum over each answer's tokens, divided by a constant, mean over answers."""
    case = Case(seed)
    terms = [(weight(p, b) * ppo((c - p).exp(), a, 0.2, 0.2)).sum() / 7 for c, p, b, a in case.sequences()]
    agree(case, DrGrpo(DrGrpoOptions(fixed_length=7)), -torch.stack(terms).mean())


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_dapo(seed: int) -> None:
    """Equation 8: two bounds, all tokens of the batch count the same."""
    case = Case(seed)
    terms = [weight(p, b) * ppo((c - p).exp(), a, 0.2, 0.28) for c, p, b, a in case.sequences()]
    agree(case, Dapo(), -torch.cat(terms).mean())


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_gspo(seed: int) -> None:
    """Equations 5 and 7: the ratio of a sequence is its likelihood ratio to the power of 1 / length."""
    case = Case(seed, spread=0.01)
    terms = []
    for c, p, b, a in case.sequences():
        s = (c.sum().exp() / p.sum().exp()) ** (1 / len(c))
        w = ((p - b).mean()).exp()
        terms.append(w * ppo(s, a, 0.003, 0.004))
    agree(case, Gspo(GspoOptions(clip_low=0.003, clip_high=0.004)), -torch.stack(terms).mean())


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_cispo(seed: int) -> None:
    """Equations 4 and 5: the clipped weight has no gradient, log pi has."""
    case = Case(seed)
    terms = [weight(p, b) * torch.clamp((c - p).exp(), 0.9, 1.1).detach() * a * c for c, p, b, a in case.sequences()]
    agree(case, Cispo(CispoOptions(clip_low=0.1, clip_high=0.1)), -torch.cat(terms).mean())


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_sapo(seed: int) -> None:
    """Equations 5 and 6, with the ratio to the policy that sampled."""
    case = Case(seed)
    terms = []
    for c, _, b, a in case.sequences():
        t = 1.0 if a > 0 else 1.05
        terms.append((4 / t / (1 + (-t * ((c - b).exp() - 1)).exp()) * a).mean())
    agree(case, Sapo(), -torch.stack(terms).mean())


@pytest.mark.parametrize("make", [Rloo, Reinforce, ReinforcePlusPlus, LitePpo, Ppo])
def test_the_others_share_grpos_loss(make: Callable[[], Any]) -> None:
    case = Case(3)
    loss, gradient = case.loss(make())
    expected, slopes = case.loss(Grpo())
    assert (loss, gradient) == (expected, slopes)


@given(seeds, st.sampled_from(["clamp", "mask"]), st.sampled_from(["sequence", "geometric"]))
@settings(max_examples=40, deadline=None)
def test_corrections_of_whole_sequences(seed: int, mode: Any, level: Any) -> None:
    case = Case(seed, spread=0.5)
    low, high = 0.8, 1.25
    terms = []
    for c, p, b, a in case.sequences():
        w = math.exp(float((p - b).sum())) if level == "sequence" else math.exp(float((p - b).mean()))
        bounded = min(max(w, low), high)
        w = bounded if mode == "clamp" or bounded == w else 0.0
        terms.append(w * ppo((c - p).exp(), a, 0.2, 0.2))
    options = GrpoOptions(behavior_level=level, behavior_mode=mode, behavior_cap=high, behavior_floor=low)
    agree(case, Grpo(options), -torch.cat(terms).mean())


@pytest.mark.parametrize("make", ALL)
@given(seed=seeds, cut=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_packing_changes_nothing(make: Callable[[], Any], seed: int, cut: int) -> None:
    case, algorithm = Case(seed), make()
    whole, gradient = case.loss(algorithm)
    parts, in_parts = case.loss(algorithm, range(cut), range(cut, 5))
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    for one, other in zip(gradient, in_parts, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("make", ALL)
def test_on_policy_each_is_the_policy_gradient_of_its_mean(make: Callable[[], Any]) -> None:
    """With all policies equal and sequences of one length, the gradient is -A over a constant."""
    case = Case(1, num_sequences=4)
    case.lengths = [3] * 4
    case.current = [torch.full((3,), -1.0 - i, dtype=torch.float64, requires_grad=True) for i in range(4)]
    case.proximal = case.behavior = [c.detach() for c in case.current]
    case.fill()
    _, gradient = case.loss(make())
    scale = gradient[0][0] / -case.advantage[0]
    assert scale > 0
    for slopes, advantage in zip(gradient, case.advantage, strict=True):
        assert slopes == pytest.approx([-advantage * scale] * 3)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("current", [-math.inf, -1e4, -1.0, 0.0])
@pytest.mark.parametrize("old", [-math.inf, -1.0])
def test_extreme_tokens_are_finite(make: Callable[[], Any], current: float, old: float) -> None:
    case = Case(2, num_sequences=2)
    case.lengths, case.advantage = [1, 1], [1.0, 0.0]
    case.current = [torch.tensor([current], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    case.proximal = case.behavior = [torch.tensor([old], dtype=torch.float64) for _ in range(2)]
    case.fill()
    loss, gradient = case.loss(make())
    assert math.isfinite(loss) and all(math.isfinite(x) for slopes in gradient for x in slopes)
    assert gradient[1] == [0.0], "no advantage, no gradient"


def group(*rewards: float | None, lengths: tuple[int, ...] = ()) -> Group:
    sizes = lengths or (1,) * len(rewards)
    return group_of([sampled(reward, sizes[i], sample=i) for i, reward in enumerate(rewards)])


def test_advantages_of_each() -> None:
    some = group(1.0, None, 0.0, 0.5)
    assert DrGrpo().advantages(some) == [0.5, 0.0, -0.5, 0.0]
    # Each against the mean of the two others.
    assert Rloo().advantages(some) == pytest.approx([0.75, 0.0, -0.75, 0.0])
    assert Reinforce().advantages(some) == ReinforcePlusPlus().advantages(some) == [1.0, 0.0, 0.0, 0.5]
    assert LitePpo().advantages(some) == [0.5, 0.0, -0.5, 0.0]
    assert Reinforce().advantages(group(2.0)) == [2.0] and Rloo().advantages(group(2.0)) == [0.0]
    assert Reinforce().advantages(group(None)) == [0.0]


def row(advantage: float, num_trained: int) -> Row:
    n = num_trained
    return Row(
        token_ids=(1,) * (n + 1),
        loss_mask=(False,) + (True,) * n,
        logprobs=(0.0,) + (-1.0,) * n,
        versions=(-1,) + (0,) * n,
        advantages=(0.0,) + (advantage,) * n,
    )


def trained(rows: list[Row]) -> list[float]:
    return [a for r in rows for a, is_trained in zip(r.advantages, r.loss_mask, strict=True) if is_trained]


def test_a_step_is_normalised_over_its_tokens() -> None:
    algorithm = ReinforcePlusPlus()
    assert isinstance(algorithm, RefinesAdvantages) and isinstance(algorithm, Algorithm)
    rows = algorithm.refine([row(1.0, 1), row(0.0, 3)])
    # Mean 1/4, variance 3/16.
    assert trained(rows) == pytest.approx([3 / 3**0.5, *[-1 / 3**0.5] * 3], rel=1e-5)
    assert [r.advantages[0] for r in rows] == [0.0, 0.0]
    assert algorithm.refine([row(2.0, 2), row(2.0, 1)])[0].advantages == (0.0, 0.0, 0.0)
    assert algorithm.refine([]) == []


def test_lite_ppo_divides_by_the_steps_deviation_and_moves_nothing() -> None:
    rows = LitePpo().refine([row(0.5, 1), row(-0.5, 2), row(0.0, 3)])
    deviation = (3 * 0.25 / 6 - (0.5 / 6) ** 2) ** 0.5
    assert trained(rows) == pytest.approx([x / deviation for x in (0.5, -0.5, -0.5, 0, 0, 0)], rel=1e-5)


def test_without_a_batch_scale_rows_stay() -> None:
    rows = [row(1.0, 1), row(0.0, 3)]
    assert Grpo().refine(rows) == rows


def test_daposs_penalty_for_long_answers() -> None:
    """Equation 13 at a limit of 10 tokens with a buffer of 4."""
    options = DapoOptions(overlong_limit=10, overlong_buffer=4, overlong_factor=0.5)
    rewards = Dapo(options).rewards(group(1.0, 1.0, 1.0, None, 1.0, lengths=(6, 8, 10, 9, 12)))
    assert rewards == [1.0, 0.75, 0.5, None, 0.5]
    with pytest.raises(ValidationError, match="overlong_buffer 0 must lie between 1 and overlong_limit 10"):
        DapoOptions(overlong_limit=10)
    assert Dapo().rewards(group(1.0, lengths=(99,))) == [1.0]


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="behavior_floor 6 is above behavior_cap 5"):
        GrpoOptions(behavior_floor=6.0)


def test_the_gates_temperature_follows_the_sign() -> None:
    sharp = Sapo(SapoOptions(temperature_negative=4.0))
    case = Case(5, num_sequences=2)
    case.lengths, case.advantage = [1, 1], [1.0, -1.0]
    case.current = [torch.tensor([-1.0], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    case.proximal = case.behavior = [torch.tensor([-1.7], dtype=torch.float64) for _ in range(2)]
    case.fill()
    _, ((up,), (down,)) = case.loss(sharp)
    assert abs(down) < abs(up)


def test_dapo_passes_over_groups_without_a_difference() -> None:
    dapo = Dapo()
    assert isinstance(dapo, SelectsGroups)
    assert dapo.keep(group(1.0, 0.0)) and dapo.keep(group(None, 1.0, 0.0))
    assert not any(dapo.keep(g) for g in (group(1.0, 1.0), group(1.0), group(None, None), group(None, 0.0)))
    assert Dapo(DapoOptions(dynamic_sampling=False)).keep(group(1.0, 1.0))
    # Length makes no difference that could be learned from.
    penalised = Dapo(DapoOptions(overlong_limit=4, overlong_buffer=2))
    assert not penalised.keep(group(1.0, 1.0, lengths=(2, 9)))
