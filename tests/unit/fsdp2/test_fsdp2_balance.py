"""The deal of rows to data ranks: complete, within the budget, even, and the same for everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.contracts.messages import Row
from areal.testing.backend_fixtures import row
from areal_fsdp2.balance import Hand, deal

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=40)


def rows_of(lengths: list[int], groups: int = 1) -> list[Row]:
    return [
        replace(row([1, 2 + i % 7], [3 + (i + t) % 50 for t in range(length)]), group=i % groups)
        for i, length in enumerate(lengths)
    ]


def tokens(rows: list[Row], hand: Hand) -> int:
    return sum(len(rows[i].token_ids) - 1 for i in hand.rows)


@given(lengths=LENGTHS, budget=st.integers(1, 200), ranks=st.integers(1, 5))
def test_every_row_is_computed_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    rows = [*rows_of(lengths), replace(row([5, 6], [7]), loss_mask=(False, False, False))]
    hands = deal(rows, budget, ranks)
    assert len(hands) == ranks and len({len(dealt) for dealt in hands}) == 1
    real = [hand for dealt in hands for hand in dealt if not hand.is_dummy]
    assert sorted(i for hand in real for i in hand.rows) == list(range(len(lengths)))
    # No round is for nothing, also when rows are longer than the budget.
    assert sum(hand.is_dummy for dealt in hands for hand in dealt) < ranks
    for hand in (hand for dealt in hands for hand in dealt):
        assert len(hand.rows) == 1 or tokens(rows, hand) <= budget
    # A dummy is the last of its rank: statistics and gradients of the real ones come first.
    assert all(sorted(dealt, key=lambda hand: hand.is_dummy) == dealt for dealt in hands)


@given(lengths=LENGTHS, budget=st.integers(1, 200), ranks=st.integers(1, 4))
def test_groups_that_must_stay_whole_do(lengths: list[int], budget: int, ranks: int) -> None:
    rows = rows_of(lengths, groups=5)
    for hand in (hand for dealt in deal(rows, budget, ranks, whole_groups=True) for hand in dealt if not hand.is_dummy):
        for group in {rows[i].group for i in hand.rows}:
            assert {i for i, r in enumerate(rows) if r.group == group} <= set(hand.rows)


def test_no_rank_idles_when_rows_fit_one_micro_batch() -> None:
    rows = rows_of([10] * 8)
    hands = deal(rows, 10_000, 4)
    assert [[len(hand.rows) for hand in dealt] for dealt in hands] == [[2]] * 4


@pytest.mark.parametrize(("num_rows", "rounds"), [(1, 1), (3, 2), (6, 3), (40, 4)])
def test_every_stage_has_a_micro_batch_if_rows_suffice(num_rows: int, rounds: int) -> None:
    hands = deal(rows_of([10] * num_rows), 10_000, 2, num_stages=4)
    assert [len(dealt) for dealt in hands] == [rounds] * 2
    assert sorted(i for dealt in hands for hand in dealt if not hand.is_dummy for i in hand.rows) == [*range(num_rows)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_load_is_even_and_the_largest_comes_first(ranks: int) -> None:
    rows = rows_of([1 + (7 * i * i) % 53 for i in range(120)])
    hands = deal(rows, 300, ranks)
    loads = [sum(tokens(rows, hand) for hand in dealt) for dealt in hands]
    assert max(loads) <= 1.1 * min(loads)
    rounds = [max(tokens(rows, dealt[number]) for dealt in hands) for number in range(len(hands[0]))]
    assert rounds == sorted(rounds, reverse=True)
    # What ranks compute at the same time is of one size; they wait for each other after each micro-batch.
    waits = sum(largest * ranks for largest in rounds) - sum(loads)
    assert waits <= 0.1 * sum(loads)


def test_too_few_rows_leave_dummies() -> None:
    hands = deal(rows_of([5]), 100, 3)
    assert [[hand.is_dummy for hand in dealt] for dealt in hands] == [[False], [True], [True]]
