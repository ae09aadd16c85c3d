"""Logprob and entropy with their gradients, against the formulas written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from areal.algorithms.update.logprobs import token_logprobs

PREDICTORS, WIDTH, VOCAB = 7, 6, 50
# Predictors 2 and 4 predict several tokens, one of them twice; 5 predicts none.
PREDICTOR = torch.tensor([0, 2, 4, 2, 1, 6, 4, 3, 2, 2])
TARGETS = torch.tensor([3, 9, 49, 0, 7, 7, 1, 2, 9, 30])


def made() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB), torch.randn(PREDICTORS, WIDTH, requires_grad=True)


@pytest.mark.parametrize("max_rows", [100, 3, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("uses", ["logprob", "entropy", "both"])
def test_values_and_gradients_are_the_literal_ones(max_rows: int, temperature: float, uses: str) -> None:
    head, hidden = made()
    logprobs, entropies = token_logprobs(head, hidden, PREDICTOR, TARGETS, temperature, max_rows)
    weights = torch.randn(2, len(TARGETS))
    weights[0] *= uses != "entropy"
    weights[1] *= uses != "logprob"
    loss = (weights[0] * logprobs).sum() if uses != "entropy" else 0.0
    loss = loss + ((weights[1] * entropies).sum() if uses != "logprob" else 0.0)
    ours = torch.autograd.grad(loss, (hidden, head.weight, head.bias))

    exact = hidden.detach().double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in head.parameters())
    table = ((exact @ weight.T + bias) / temperature).log_softmax(-1)
    wanted = table[PREDICTOR, TARGETS], -(table.exp() * table).sum(-1)[PREDICTOR]
    exact_loss = (weights.double() * torch.stack(wanted)).sum()
    theirs = torch.autograd.grad(exact_loss, (exact, weight, bias))

    torch.testing.assert_close(logprobs.double(), wanted[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropies.double(), wanted[1], atol=1e-6, rtol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=2e-6, rtol=1e-5)


def test_many_logits_are_not_kept() -> None:
    head, hidden = made()
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logprobs(head, hidden, PREDICTOR, TARGETS, 1.0, 2)
    assert max(kept) < VOCAB * 2


def test_half_precision_logits_are_worked_on_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 1000.0, -1000.0]], dtype=torch.bfloat16)
    logprobs, entropies = token_logprobs(lambda x: x, logits, torch.tensor([0, 0]), torch.tensor([2, 3]), 1.0, 10)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert logprobs.tolist() == [0.0, -2000.0]
    assert entropies.tolist() == [0.0, 0.0]
