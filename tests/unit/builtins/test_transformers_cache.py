"""The slot cache: growth keeps what is stored, moves copy whole slots, shared prompts reach all their slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from areal.builtins.transformers_engine.cache import SlotCache


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def states(rows: int, tokens: int, offset: float = 0.0) -> Tensor:
    """[rows, 2 heads, tokens, 4]: every element tells its row and position."""
    marks = torch.arange(rows).view(-1, 1, 1, 1) * 1000 + torch.arange(tokens).view(1, 1, -1, 1) + offset
    return marks.float().expand(rows, 2, tokens, 4)


def fill(cache: SlotCache, rows: int, tokens: int, layers: int = 2) -> None:
    cache.prefill(0, rows, tokens, None)
    for layer in range(layers):
        cache.update(states(rows, tokens, layer), states(rows, tokens, layer + 0.5), layer)


def step(cache: SlotCache, positions: list[int], layers: int = 2) -> list[tuple[Tensor, Tensor]]:
    rows = len(positions)
    cache.decode(torch.arange(rows), torch.tensor(positions), max(positions) + 1)
    marks = torch.tensor(positions).view(-1, 1, 1, 1) + torch.arange(rows).view(-1, 1, 1, 1) * 1000.0
    new = marks.expand(rows, 2, 1, 4)
    return [cache.update(new + layer, new + layer + 0.5, layer) for layer in range(layers)]


def test_growth_keeps_what_is_stored() -> None:
    cache = SlotCache(max_slots=8, max_tokens=100, max_kv_tokens=10_000)
    fill(cache, rows=3, tokens=5)
    first = cache.window.capacity
    for position in range(5, 59):
        step(cache, [position] * 3)
    assert cache.window.capacity > first, "it has grown"
    for layer, (keys, values) in enumerate(step(cache, [59] * 3)):
        assert keys.shape == (3, 2, 60, 4)
        assert torch.equal(keys, states(3, 60, layer))
        assert torch.equal(values, states(3, 60, layer + 0.5))


def test_slots_grow_beside_what_is_stored() -> None:
    cache = SlotCache(max_slots=40, max_tokens=100, max_kv_tokens=10_000)
    fill(cache, rows=2, tokens=4)
    cache.prefill(2, 5, 6, None)
    for layer in range(2):
        cache.update(states(3, 6, layer + 7000), states(3, 6, layer + 7000.5), layer)
    keys, values = step(cache, [4, 4, 6, 6, 6])[1]
    assert torch.equal(keys[:2, :, :4], states(2, 4, 1))
    assert torch.equal(values[2:, :, :6], states(3, 6, 7001.5))


def test_capacity_never_exceeds_the_limits() -> None:
    cache = SlotCache(max_slots=3, max_tokens=20, max_kv_tokens=10_000)
    fill(cache, rows=1, tokens=2)
    fill(cache, rows=3, tokens=20)
    assert cache.window.capacity == (3, 20)


def test_memory_stays_within_the_bound_when_lengths_and_numbers_change() -> None:
    cache = SlotCache(max_slots=64, max_tokens=1000, max_kv_tokens=640)
    fill(cache, rows=40, tokens=10)
    assert cache.window.capacity == (40, 16)
    step(cache, [10])
    step(cache, [11])
    fill(cache, rows=1, tokens=600)
    assert cache.window.capacity == (1, 608), "slots are given up for length"
    fill(cache, rows=30, tokens=12)
    assert cache.window.capacity == (30, 16), "and length for slots"
    stored = step(cache, [12] * 30)[1]
    assert torch.equal(stored[0], states(30, 13, 1))


def test_a_short_prefill_keeps_the_longer_rows_that_run() -> None:
    cache = SlotCache(max_slots=64, max_tokens=1000, max_kv_tokens=200)
    fill(cache, rows=2, tokens=40)
    cache.prefill(2, 5, 4, None)
    for layer in range(2):
        cache.update(states(3, 4), states(3, 4), layer)
    keys, _ = step(cache, [40, 40, 4, 4, 4])[1]
    assert torch.equal(keys[:2], states(2, 41, 1))


def test_new_memory_is_finite() -> None:
    # A masked NaN is still a NaN after softmax times values.
    cache = SlotCache(max_slots=4, max_tokens=64, max_kv_tokens=10_000)
    fill(cache, rows=1, tokens=3)
    fill(cache, rows=4, tokens=50)
    for layer in range(2):
        keys, values = step(cache, [50] * 4)[layer]
        assert bool(keys.isfinite().all() and values.isfinite().all())


def test_moves_copy_whole_slots() -> None:
    cache = SlotCache(max_slots=6, max_tokens=64, max_kv_tokens=10_000)
    fill(cache, rows=6, tokens=7)
    cache.move([(5, 0), (4, 2)])
    keys, _ = step(cache, [7, 7, 7, 7])[0]
    assert keys[:, 0, 3, 0].tolist() == [5003, 1003, 4003, 3003]


def test_moves_before_the_first_pass_are_harmless() -> None:
    SlotCache(max_slots=6, max_tokens=64, max_kv_tokens=10_000).move([(1, 0)])


def test_equal_prompts_are_copied_to_all_their_slots() -> None:
    cache = SlotCache(max_slots=6, max_tokens=64, max_kv_tokens=10_000)
    cache.prefill(0, 4, 3, torch.tensor([0, 0, 1, 0]))
    returned, _ = cache.update(states(2, 3), states(2, 3), 0)
    assert returned.shape[0] == 2, "the pass itself sees each prompt once"
    cache.update(states(2, 3), states(2, 3), 1)
    keys, _ = step(cache, [3, 3, 3, 3])[0]
    assert keys[:, 0, 2, 0].tolist() == [2, 2, 1002, 2]


def test_rows_write_at_their_own_positions() -> None:
    cache = SlotCache(max_slots=2, max_tokens=64, max_kv_tokens=10_000)
    fill(cache, rows=2, tokens=5)
    keys, _ = step(cache, [2, 5])[0]
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert keys[1, 0, :, 0].tolist() == [1000, 1001, 1002, 1003, 1004, 1005]
