"""Sampling: the distribution, the truncated sets, the random streams, the logprobs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.builtins.transformers_engine.sampling import (
    SamplingRows,
    inverse_cdf,
    keep_most_probable,
    uniforms,
)
from areal.contracts.messages import Sampling

LARGEST = 1 - 2.0**-53


def rows(samplings: list[Sampling], seeds: list[int] | None = None, counts: list[int] | None = None) -> SamplingRows:
    numbers = list(range(len(samplings)))
    return SamplingRows.of(samplings, seeds or numbers, counts or [0 for _ in numbers], "cpu")


def allowed(probabilities: list[float], top_k: int, top_p: float) -> set[int]:
    """The definition, in plain Python: top-k first, then the smallest set with `top_p` of what is left."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[: top_k or None]
    total, mass, kept = math.fsum(probabilities[i] for i in order), 0.0, set()
    for i in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.add(i)
        mass += probabilities[i]
    return kept


def test_uniforms_are_uniform_and_independent() -> None:
    streams = torch.arange(200).repeat_interleave(200)
    numbers = uniforms(streams, torch.arange(200).repeat(200)).reshape(200, 200)
    assert 0.0 <= float(numbers.min()) <= float(numbers.max()) <= LARGEST
    observed = torch.histc(numbers, bins=50, min=0, max=1)
    expected = numbers.numel() / 50
    # 49 degrees of freedom: mean 49, standard deviation 10.
    assert float(((observed - expected) ** 2 / expected).sum()) < 100
    for left, right in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.02


def test_splitmix_matches_its_published_outputs() -> None:
    # First outputs of SplitMix64 seeded with 1234567, as listed with the reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = uniforms(torch.tensor([1234567] * 3), torch.arange(3))
    assert numbers.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=5), Sampling(top_p=0.8)])
def test_frequencies_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    probabilities = (logits / sampling.temperature).softmax(-1)
    keep = allowed(probabilities.tolist(), sampling.top_k, sampling.top_p)
    expected = torch.tensor([float(p) if i in keep else 0.0 for i, p in enumerate(probabilities)])
    expected = expected / expected.sum()
    number = 40_000
    tokens, _ = rows([sampling] * number).sample(logits.expand(number, -1))
    observed = torch.bincount(tokens, minlength=12)
    assert set(observed.nonzero().flatten().tolist()) <= keep
    seen = expected * number > 5
    chi_square = ((observed - expected * number) ** 2 / (expected * number))[seen].sum()
    freedom = int(seen.sum()) - 1
    assert float(chi_square) < freedom + 5 * math.sqrt(2 * freedom)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.5, 1.0]), min_size=1, max_size=40).filter(any),
    filler=st.booleans(),
    uniform=st.one_of(st.floats(0, LARGEST), st.sampled_from([0.0, 0.5, LARGEST])),
)
@settings(max_examples=200, deadline=None)
def test_a_weight_of_zero_is_never_drawn(weights: list[float], filler: bool, uniform: float) -> None:
    # With filler the row is a multiple of the block size and searched by blocks.
    row = [0.0] * 100 + weights + [0.0] * (156 - len(weights)) if filler else weights
    tensor = torch.tensor([row], dtype=torch.float32)
    index = int(inverse_cdf(tensor, torch.tensor([uniform], dtype=torch.float64)))
    assert tensor[0, index] > 0


@given(seed=st.integers(0, 2**32), blocks=st.integers(1, 6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_searching_by_blocks_finds_what_searching_all_finds(seed: int, blocks: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers add up without rounding, so that both searches must agree, also at the borders.
    weights = torch.randint(0, 3, (8, 64 * blocks), generator=generator).float()
    weights[:, data.draw(st.integers(0, 64 * blocks - 1))] += 1
    edge = weights.double().cumsum(-1) / weights.sum(-1, keepdim=True, dtype=torch.float64)
    uniform = edge[torch.arange(8), torch.randint(0, 64 * blocks, (8,), generator=generator)].clamp(max=LARGEST)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    target = uniform.unsqueeze(1) * cumulated[:, -1:]
    expected = torch.searchsorted(cumulated, target, right=True).squeeze(1)
    assert inverse_cdf(weights, uniform).tolist() == expected.tolist()


@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(4, 64).map(lambda share: share / 64))
@settings(max_examples=100, deadline=None)
def test_truncation_keeps_exactly_the_defined_set(seed: int, top_k: int, top_p: float) -> None:
    # Multiples of 1/64 add up and multiply without rounding, so that the border is the same in every order.
    counts = torch.randint(0, 9, (16,), generator=torch.Generator().manual_seed(seed))
    counts[0] = max(1, int(counts[0]))
    probabilities = counts.float() / 64
    kept, order = keep_most_probable(probabilities[None], torch.tensor([top_k]), torch.tensor([top_p]))
    found = {int(token) for token, weight in zip(order[0], kept[0], strict=True) if weight > 0}
    top_p32 = float(torch.tensor(top_p))
    assert found == {i for i in allowed(probabilities.tolist(), top_k, top_p32) if probabilities[i] > 0}


def test_the_most_probable_token_stays_however_small_top_p_is() -> None:
    tokens, _ = rows([Sampling(top_p=1e-9)] * 50).sample(torch.randn(8).expand(50, -1))
    assert len(set(tokens.tolist())) == 1


def test_rows_do_not_depend_on_their_neighbours() -> None:
    kinds = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=4, temperature=1.4), Sampling(top_p=0.6)]
    logits = torch.randn(len(kinds), 50)
    tokens, logprobs = rows(kinds, seeds=[7, 8, 9, 10], counts=[3, 1, 4, 1]).sample(logits)
    for i, sampling in enumerate(kinds):
        alone = rows([sampling], seeds=[7 + i], counts=[[3, 1, 4, 1][i]]).sample(logits[i : i + 1])
        assert (int(alone[0]), float(alone[1])) == (int(tokens[i]), float(logprobs[i]))


def test_logprobs_are_of_the_whole_vocabulary_at_temperature() -> None:
    logits = torch.randn(3, 50) * 3
    kinds = [Sampling(temperature=0.7, top_k=2), Sampling(temperature=0.0), Sampling(temperature=2.0)]
    tokens, logprobs = rows(kinds).sample(logits.to(torch.bfloat16))
    for i, temperature in enumerate([0.7, 1.0, 2.0]):
        truth = (logits[i].to(torch.bfloat16).float() / temperature).log_softmax(-1)
        assert float(logprobs[i]) == pytest.approx(float(truth[tokens[i]]), abs=1e-5)
    assert int(tokens[1]) == int(logits[1].to(torch.bfloat16).argmax())


def test_each_step_takes_the_next_number_of_the_stream() -> None:
    logits = torch.zeros(1, 1000)
    stepping = rows([Sampling()], seeds=[5])
    steps = [int(stepping.sample(logits)[0]) for _ in range(6)]
    assert steps == [int(rows([Sampling()], seeds=[5], counts=[i]).sample(logits)[0]) for i in range(6)]
    assert len(set(steps)) > 3


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 3, 0])
def test_any_integer_is_a_seed(seed: int) -> None:
    tokens, _ = rows([Sampling()], seeds=[seed]).sample(torch.zeros(1, 10))
    assert 0 <= int(tokens) < 10


def test_a_row_that_is_not_finite_is_told_by_its_logprob() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = math.nan
    tokens, logprobs = rows([Sampling(), Sampling(top_k=3)]).sample(logits)
    assert math.isfinite(float(logprobs[0]))
    assert math.isnan(float(logprobs[1]))
    assert int(tokens[1]) < 10
