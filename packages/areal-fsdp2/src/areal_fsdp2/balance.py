"""The deal: which data rank computes which rows, in micro-batches that fit the token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.algorithms.update.packing import fill, units
from areal.contracts.messages import Row


@dataclass(frozen=True, slots=True)
class Hand:
    """One micro-batch of one rank. Invariant: has at least one row with a trained token."""

    rows: tuple[int, ...]
    is_dummy: bool = False
    """Computed only because the other ranks compute; counts for nothing."""


def deal(
    rows: Sequence[Row], budget: int, num_ranks: int, *, whole_groups: bool = False, num_stages: int = 1
) -> list[list[Hand]]:
    """Return the micro-batches of every rank, the same number for each, the largest first; none without trained tokens.

    They are as few as `budget` allows, but if rows suffice no fewer than the stages of a pipeline, so that all work.

    Each row is computed by one rank. Every rank makes the whole deal by itself: all have the same rows.
    """
    loads = units(rows, whole_groups=whole_groups)
    if not loads:
        return [[] for _ in range(num_ranks)]
    total, longest = sum(length for _, length in loads), max(length for _, length in loads)
    # A unit above the budget is one micro-batch, however many budgets it would fill.
    num_rounds = max(min(num_stages, -(-len(loads) // num_ranks)), -(-len(fill(loads, budget)) // num_ranks))
    low, high = min(budget, max(longest, -(-total // (num_rounds * num_ranks)))), budget
    while low < high:  # the least that still makes no more micro-batches: none is much larger than another
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(loads, middle)) <= num_rounds * num_ranks else (middle + 1, high)
    length_of = {i: length / len(unit) for unit, length in loads for i in unit}
    batches = sorted(fill(loads, low), key=lambda batch: -sum(length_of[i] for i in batch))
    shortest = min(loads, key=lambda load: load[1])[0][:1]
    dummy = Hand(tuple(shortest), is_dummy=True)
    hands = [Hand(tuple(batch)) for batch in batches]
    hands += [dummy] * (num_rounds * num_ranks - len(hands))
    return [_every(hands, rank, num_ranks) for rank in range(num_ranks)]


def _every(hands: list[Hand], rank: int, num_ranks: int) -> list[Hand]:
    """Return a rank's hands: dealt to and fro, so that nobody gets the larger one of every round."""
    return [
        hands[round_ * num_ranks + (rank if round_ % 2 == 0 else num_ranks - 1 - rank)]
        for round_ in range(len(hands) // num_ranks)
    ]
