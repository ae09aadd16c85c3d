"""Attention within rows is causal attention of each row alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import softmax

from areal.algorithms.update.attention import RowGroups, attend

LENGTHS = (3, 5, 5)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def groups() -> RowGroups:
    """Row 0 has three tokens of its own; rows 1 and 2 share two tokens; row 0 is filled up to five."""
    lines = torch.tensor([[0, 1, 2, 2, 2], [3, 4, 5, 6, 7], [3, 4, 8, 9, 10]])
    first = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9, 12, 13, 14])
    return RowGroups(indices=(lines[:1], lines[1:]), first=first)


def literal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Token by token: each of the 11 tokens looks at its row's tokens up to itself."""
    rows = [[0, 1, 2], [3, 4, 5, 6, 7], [3, 4, 8, 9, 10]]
    result = torch.zeros(11, HEADS, WIDTH)
    for row in rows:
        for place, token in enumerate(row):
            seen = row[: place + 1] if window is None else row[max(0, place + 1 - window) : place + 1]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = key[0, kv, seen] @ query[0, head, token] * 0.3
                result[token, head] = softmax(scores, 0) @ value[0, kv, seen]
    return result


@pytest.mark.parametrize("window", [None, 2, 10])
def test_each_token_sees_its_own_row(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, 11, WIDTH, generator=generator, requires_grad=True)
    key, value = (torch.randn(1, KV_HEADS, 11, WIDTH, generator=generator, requires_grad=True) for _ in range(2))
    weight = torch.randn(11, HEADS, WIDTH, generator=generator)
    results, gradients = [], []
    for ours in (True, False):
        if ours:
            mixed, _ = attend(
                nn.Module(), query, key, value, None, row_groups=groups(), scaling=0.3, sliding_window=window
            )
            mixed = mixed[0]
        else:
            mixed = literal(query, key, value, window)
        results.append(mixed)
        gradients.append(torch.autograd.grad((mixed * weight).sum(), (query, key, value)))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
