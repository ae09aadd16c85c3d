"""Logprob and entropy with their gradients: against the formulas written out, in one process and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring.head_sides import OURS, Case, counted
from measuring.live_bytes import LiveBytes
from torch import Tensor

from areal.algorithms.update.logprobs import head_logprobs, logit_scaling
from areal.testing.ranks import Ranks, free_rendezvous

PREDICTORS, WIDTH, VOCAB = 7, 6, 50
# Predictors 2 and 4 predict several tokens, one of them twice; 5 predicts none.
PREDICTOR = torch.tensor([0, 2, 4, 2, 1, 6, 4, 3, 2, 2])
TARGETS = torch.tensor([3, 9, 49, 0, 7, 7, 1, 2, 9, 30])
USES = {"logprob": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, 0.5)}


def made(seed: int = 0, predictors: int = PREDICTORS, width: int = WIDTH, vocab: int = VOCAB) -> list[Tensor]:
    """Return hidden states, weight and bias in float32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in ((predictors, width), (vocab, width), (vocab,))]


def naive(
    inputs: list[Tensor], predictor: Tensor, targets: Tensor, temperature: float, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    hidden, weight, bias = inputs
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = (logits.float() if logits.dtype == torch.bfloat16 else logits) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    table = (logits / temperature).log_softmax(-1)
    return table[predictor, targets], -(table.exp() * table).sum(-1)[predictor]


def loss_of(found: tuple[Tensor, Tensor], use: str = "both") -> Tensor:
    """Return a loss in which every token has another weight."""
    weights = torch.linspace(-1, 1, len(found[0]), dtype=found[0].dtype)
    of_logprob, of_entropy = USES[use]
    loss = found[0].new_zeros(())
    if of_logprob:
        loss = loss + of_logprob * (weights * found[0]).sum()
    if of_entropy:
        loss = loss + of_entropy * (weights.square() * found[1]).sum()
    return loss


def wanted_of(
    inputs: list[Tensor], predictor: Tensor, targets: Tensor, use: str, *curve: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return values and gradients in float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    values = naive(exact, predictor, targets, *curve)
    return values, torch.autograd.grad(loss_of(values, use), exact)


def assert_same(found: Any, wanted: Any, atol: float) -> None:
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=atol, rtol=atol)


@pytest.mark.parametrize(("chunk", "tile"), [(100, 100), (3, 7), (1, 50), (7, 1)])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, None), (0.6, 1.0, None), (0.7, 1.3, 2.0)])
@pytest.mark.parametrize("use", list(USES))
def test_values_and_gradients_are_the_literal_ones(
    chunk: int, tile: int, temperature: float, scale: float, softcap: float | None, use: str
) -> None:
    inputs = [tensor.requires_grad_() for tensor in made()]
    hidden, weight, bias = inputs
    found = head_logprobs(
        hidden, weight, PREDICTOR, TARGETS, temperature, bias=bias, scale=scale, softcap=softcap, chunk=chunk, tile=tile
    )
    ours = torch.autograd.grad(loss_of(found, use), inputs)
    values, theirs = wanted_of(inputs, PREDICTOR, TARGETS, use, temperature, scale, softcap)
    assert_same(found, values, 1e-6)
    assert_same(ours, theirs, 2e-6)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_neither_shapes_nor_pieces_matter(data: st.DataObject) -> None:
    sizes = st.integers(1, 40)
    states, width, vocab = data.draw(sizes), data.draw(st.integers(1, 9)), data.draw(sizes)
    tokens = data.draw(st.lists(st.tuples(st.integers(0, states - 1), st.integers(0, vocab - 1)), max_size=60))
    predictor, targets = torch.tensor(tokens, dtype=torch.int64).reshape(-1, 2).unbind(-1)
    inputs = [tensor.requires_grad_() for tensor in made(data.draw(st.integers(0, 99)), states, width, vocab)]
    hidden, weight, bias = inputs
    found = head_logprobs(hidden, weight, predictor, targets, bias=bias, chunk=data.draw(sizes), tile=data.draw(sizes))
    values, theirs = wanted_of(inputs, predictor, targets, "both", 1.0, 1.0, None)
    assert_same(found, values, 4e-6)
    assert_same(torch.autograd.grad(loss_of(found), inputs), theirs, 4e-6)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bf16_is_as_near_to_float64_as_the_naive_path(how: str) -> None:
    """Products are bf16, sums float32; with autocast, float32 weights get float32 gradients."""
    inputs = made(1, 300, 32, 500)
    dtype = torch.bfloat16 if how == "weights" else torch.float32
    predictor, targets = torch.arange(300), torch.arange(300) % 500

    def errors(compute: Any) -> list[float]:
        ours = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found = compute(ours)
        gradients = torch.autograd.grad(loss_of(found), ours)
        assert [gradient.dtype for gradient in gradients] == [dtype] * 3
        assert found[0].dtype == found[1].dtype == torch.float32
        rounded = [tensor.to(dtype) for tensor in inputs]
        values, theirs = wanted_of(rounded, predictor, targets, "both", 1.0, 1.0, None)
        pairs = zip((*found, *gradients), (*(v.detach() for v in values), *theirs), strict=True)
        return [float((mine.detach() - other).norm() / other.norm()) for mine, other in pairs]

    by_pieces = errors(
        lambda ours: head_logprobs(ours[0], ours[1], predictor, targets, bias=ours[2], chunk=64, tile=100)
    )
    by_the_book = errors(lambda ours: naive(ours, predictor, targets, 1.0, 1.0, None))
    assert all(0 < mine < 1.2 * other for mine, other in zip(by_pieces, by_the_book, strict=True))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: int) -> None:
    inputs = [tensor.requires_grad_(i != frozen) for i, tensor in enumerate(made())]
    hidden, weight, bias = inputs
    loss_of(head_logprobs(hidden, weight, PREDICTOR, TARGETS, bias=bias, chunk=3, tile=9)).backward()
    _, theirs = wanted_of(inputs, PREDICTOR, TARGETS, "both", 1.0, 1.0, None)
    assert inputs[frozen].grad is None
    assert_same([t.grad for t in inputs if t.requires_grad], [g for i, g in enumerate(theirs) if i != frozen], 2e-6)


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, bias = (tensor.requires_grad_() for tensor in made())
    with torch.no_grad():
        logprobs, entropies = head_logprobs(hidden, weight, PREDICTOR, TARGETS, bias=bias)
    assert logprobs.grad_fn is None and entropies.grad_fn is None


@pytest.mark.parametrize("frozen", [False, True])
def test_logits_never_exist_whole(frozen: bool) -> None:
    chunk, tile, states, width, vocab = 32, 64, 256, 8, 4096
    hidden, weight, _ = (tensor.requires_grad_() for tensor in made(0, states, width, vocab))
    weight.requires_grad_(not frozen)
    predictor, targets = torch.arange(states), torch.arange(states)
    live = LiveBytes()
    live.count(hidden, weight)
    live.restart()
    before = live.now
    with live:
        loss_of(head_logprobs(hidden, weight, predictor, targets, chunk=chunk, tile=tile)).backward()
    piece = 4 * chunk * tile
    gradients = 4 * width * (states + (0 if frozen else vocab))
    numbers = 30 * 8 * states
    assert live.largest <= max(piece, gradients) < 4 * states * vocab / 8
    assert live.peak - before <= gradients + 2 * piece + numbers


def test_the_peak_of_a_long_sequences_quarter_is_near_that_of_the_weights() -> None:
    """2048 states of a sequence of 8192, a vocabulary of 151,936: sizes alone, no memory."""
    case = Case(OURS, sequence=2048, ranks=1, dtype="bfloat16", hidden=1024, vocab=151936)
    found = counted(case, fake=True)
    logits = 4 * 2048 * 151936 / 2**20
    assert found["peak"] < found["floor"] + logits / 10 < 1.4e9 / 2**20


def test_live_bytes_are_those_that_are_held() -> None:
    old = torch.zeros(1000)
    live = LiveBytes()
    live.count(old, old[:10])
    with live:
        new = old + old.exp()  # for a moment both
        view = new[5:]
        del new
        assert live.now == 8000
        del view
        assert live.now == 4000
        old.untyped_storage().resize_(0)
        live.count(old)
    assert (live.now, live.restart(), live.peak) == (0, 12000, 0)


def test_extreme_logits_and_tokens_outside_the_vocabulary() -> None:
    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[1.0], [2.0], [1000.0], [-1000.0]])
    predictor, targets = torch.zeros(5, dtype=torch.int64), torch.tensor([2, 3, 0, 4, -1])
    logprobs, entropies = head_logprobs(hidden, weight, predictor, targets, tile=1)
    assert logprobs.tolist() == [0.0, -2000.0, -999.0, -torch.inf, -torch.inf]
    assert entropies.tolist() == [0.0] * 5


def test_what_a_configuration_says_about_logits() -> None:
    class Config:
        logit_scale = 0.5
        logits_scaling = 4.0
        final_logit_softcapping = 30

    assert logit_scaling(Config()) == (0.125, 30.0)
    assert logit_scaling(object()) == (1.0, None)


class Slice:
    """One rank's part of the vocabulary."""

    def __init__(self, rank: int, rendezvous: str, bounds: list[int]) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://{rendezvous}", rank=rank, world_size=len(bounds) - 1)
        self._low, self._high = bounds[rank], bounds[rank + 1]

    def gradients(self, softcap: float | None) -> list[Tensor]:
        """Return the values and their gradients."""
        hidden, weight, bias = made()
        slices = hidden, weight[self._low : self._high], bias[self._low : self._high]
        inputs = [tensor.requires_grad_() for tensor in slices]
        found = head_logprobs(
            inputs[0], inputs[1], PREDICTOR, TARGETS, 0.8, bias=inputs[2], softcap=softcap, vocab_start=self._low,
            group=dist.group.WORLD, chunk=4, tile=9,
        )  # fmt: skip
        return [*(value.detach() for value in found), *torch.autograd.grad(loss_of(found), inputs)]


@pytest.fixture(scope="module")
def slices() -> Any:
    rendezvous = free_rendezvous()
    ranks = Ranks(2, f"{__name__}:Slice", lambda rank: (rank, rendezvous, [0, 31, VOCAB]))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_vocabulary_over_two_processes(slices: Ranks, softcap: float | None) -> None:
    values, (to_hidden, to_weight, to_bias) = wanted_of(made(), PREDICTOR, TARGETS, "both", 0.8, 1.0, softcap)
    first, second = slices.call("gradients", softcap)
    assert_same(first[:3], (*values, to_hidden), 2e-6)
    assert_same(second[:3], first[:3], 0.0)
    assert_same([torch.cat(pair) for pair in zip(first[3:], second[3:], strict=True)], (to_weight, to_bias), 2e-6)
