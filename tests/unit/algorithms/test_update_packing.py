"""Rows become prefix trees, and the tree says again what the rows said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms.update.packing import Packed, micro_batches, pack
from areal.contracts.messages import Row

CPU = torch.device("cpu")


def row(token_ids: Sequence[int], mask: Sequence[bool]) -> Row:
    length = len(token_ids)
    return Row(
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        logprobs=(0.0,) * length,
        versions=(0,) * length,
        advantages=(1.0,) * length,
    )


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        token_ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        mask = draw(st.lists(st.booleans(), min_size=len(token_ids), max_size=len(token_ids)))
        rows.append(row(token_ids, [False, *mask[1:]]))
    return rows


@given(some_rows(), st.integers(1, 60))
def test_micro_batches_hold_each_trained_row_once_within_the_budget(rows: list[Row], budget: int) -> None:
    batches = micro_batches(rows, budget)
    assert sorted(i for batch in batches for i in batch) == [i for i, r in enumerate(rows) if r.num_loss_tokens]
    for batch in batches:
        assert batch
        # What comes after the last trained token, and that token itself, are no inputs.
        used = sum(max(t for t, trained in enumerate(rows[i].loss_mask) if trained) for i in batch)
        assert used <= budget or len(batch) == 1


@given(some_rows())
@settings(max_examples=60)
def test_every_trained_token_is_predicted_from_exactly_what_stands_before_it(rows: list[Row]) -> None:
    for chosen in micro_batches(rows, 10_000):
        packed = pack(rows, chosen, CPU)
        prefixes = _prefixes(packed)
        assert len(set(prefixes)) == len(prefixes), "a prefix stands twice"
        wanted = [
            (number, rows[i].token_ids[:t], rows[i].token_ids[t])
            for number, i in enumerate(packed.rows)
            for t, trained in enumerate(rows[i].loss_mask)
            if trained
        ]
        nodes = packed.predictors[packed.predictor].tolist()
        found = zip(packed.sequence.tolist(), (prefixes[node] for node in nodes), packed.targets.tolist(), strict=True)
        assert list(found) == wanted


def _prefixes(packed: Packed) -> list[tuple[int, ...]]:
    """Return for each node the tokens of its row up to it, read from the lines that attention sees."""
    tokens, positions, first = (t.tolist() for t in (packed.token_ids, packed.positions, packed.groups.first))
    places = [
        (line.tolist(), column) for group in packed.groups.indices for line in group for column in range(len(line))
    ]
    prefixes = []
    for node, place in enumerate(first):
        line, column = places[place]
        assert line[column] == node
        assert positions[node] == column
        prefixes.append(tuple(tokens[n] for n in line[: column + 1]))
    return prefixes


def test_rows_of_one_prompt_share_it() -> None:
    prompt = [5, 6, 7, 8]
    rows = [row([*prompt, 1, answer], [False] * 4 + [True] * 2) for answer in range(10)]
    packed = pack(rows, range(10), CPU)
    # The answers' last tokens are not computed: they predict nothing.
    assert packed.token_ids.tolist() == [*prompt, 1]
    assert packed.predictors.tolist() == [3, 4]
    assert packed.predictor.tolist() == [0, 1] * 10
    assert packed.targets.tolist() == [x for answer in range(10) for x in (1, answer)]


def test_lengths_fall_into_few_groups_with_little_filling() -> None:
    rows = [row([i] * (length + 1), [False] * length + [True]) for i, length in enumerate(range(1, 513))]
    packed = pack(rows, range(len(rows)), CPU)
    sizes = [group.shape for group in packed.groups.indices]
    assert len(sizes) <= 64
    filled, needed = sum(b * n for b, n in sizes), sum(range(1, 513))
    assert needed <= filled <= 1.07 * needed
    assert len(packed.token_ids) == needed
