"""Trajectories to rows: every sampled token exactly once, with its own numbers."""

from __future__ import annotations

import pytest
from flow_samples import make_group, make_trajectory, make_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.contracts.messages import Completion, Outcome, Trajectory
from areal.flow.trainer.rows import has_advantage, mask_stale, rows_of


def test_a_single_turn() -> None:
    group = make_group(0, [make_trajectory(0, 0, turns=[make_turn((5, 6), (7, 8, 9), version=3)])])
    (row,) = rows_of(group, [0.5])
    assert row.token_ids == (5, 6, 7, 8, 9)
    assert row.loss_mask == (False, False, True, True, True)
    assert row.logprobs == (0.0, 0.0, -0.25, -0.5, -0.75)
    assert row.versions == (-1, -1, 3, 3, 3)
    assert row.advantages == (0.0, 0.0, 0.5, 0.5, 0.5)
    assert row.proximal_logprobs is None and row.num_loss_tokens == 3


def test_turns_that_continue_become_one_row_and_others_new_ones() -> None:
    turns = [
        make_turn((1,), (2, 3), version=0),
        make_turn((1, 2, 3, 9), (4,), version=1),
        make_turn((1, 2, 3), (5,), version=2),  # goes back: another branch
        make_turn((1, 2, 3, 5, 8), (6, 7), version=3),
    ]
    group = make_group(0, [make_trajectory(0, 0, turns=turns)])
    first, second = rows_of(group, [(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)])
    assert first.token_ids == (1, 2, 3, 9, 4)
    assert first.loss_mask == (False, True, True, False, True)
    assert first.versions == (-1, 0, 0, -1, 1)
    assert first.advantages == (0.0, 0.1, 0.2, 0.0, 0.3)
    assert second.token_ids == (1, 2, 3, 5, 8, 6, 7)
    assert second.loss_mask == (False, False, False, True, False, True, True)
    assert second.advantages == (0.0, 0.0, 0.0, 0.4, 0.0, 0.5, 0.6)
    assert second.logprobs == (0.0, 0.0, 0.0, -0.25, 0.0, -0.25, -0.5)


def test_trajectories_that_failed_or_said_nothing_give_no_rows() -> None:
    turn = make_turn((1,), (2,))
    failed = [
        Trajectory(group=0, sample=sample, turns=(turn,), outcome=outcome)
        for sample, outcome in enumerate([Outcome.error("x"), Outcome.timeout("y")])
    ]
    silent = make_trajectory(0, 2, turns=[])
    empty = make_trajectory(0, 3, turns=[make_turn((1,), ())])
    good = make_trajectory(0, 4, turns=[make_turn((1,), ()), turn])
    rows = rows_of(make_group(0, [*failed, silent, empty, good]), [1.0, 1.0, 1.0, 1.0, 2.0])
    assert [row.token_ids for row in rows] == [(1, 2)]
    assert rows[0].advantages == (0.0, 2.0)


def test_advantages_of_another_length() -> None:
    group = make_group(4, [make_trajectory(4, 2, turns=[make_turn((1,), (2, 3))])])
    with pytest.raises(ValueError, match="trajectory 4/2 has 2 tokens and got 3 advantages"):
        rows_of(group, [(1.0, 2.0, 3.0)])
    with pytest.raises(ValueError, match="zip"):
        rows_of(group, [1.0, 1.0])


def test_stale_tokens_leave_the_loss_with_all_their_numbers() -> None:
    turns = [make_turn((1,), (2, 3), version=4), make_turn((1, 2, 3), (5,), version=6)]
    (row,) = rows_of(make_group(0, [make_trajectory(0, 0, turns=turns)]), [1.5])
    masked, taken = mask_stale(row, 5)
    assert taken == 2 and masked.token_ids == row.token_ids
    assert masked.loss_mask == (False, False, False, True)
    assert masked.advantages == (0.0, 0.0, 0.0, 1.5)
    assert masked.versions == (-1, -1, -1, 6)
    assert masked.logprobs == (0.0, 0.0, 0.0, -0.25)
    assert mask_stale(row, 4) == (row, 0)
    nothing, taken = mask_stale(row, 7)
    assert taken == 3 and nothing.num_loss_tokens == 0 and not has_advantage(nothing)


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@st.composite
def episodes(draw: st.DrawFn) -> list[Completion]:
    turns: list[Completion] = []
    for version in range(draw(st.integers(1, 5))):
        before = turns[-1].prompt_ids + turns[-1].token_ids if turns and draw(st.booleans()) else ()
        turns.append(make_turn((*before, *draw(TOKENS)), draw(TOKENS), version))
    return turns


@given(episodes())
@settings(max_examples=80, deadline=None)
def test_every_sampled_token_is_trained_once(turns: list[Completion]) -> None:
    trajectory = make_trajectory(0, 0, turns=turns)
    advantages = [float(number + 1) for number in range(trajectory.num_tokens)]
    rows = rows_of(make_group(0, [trajectory]), [advantages])
    trained = [
        (token, logprob, version, advantage)
        for row in rows
        for token, kept, logprob, version, advantage in zip(
            row.token_ids, row.loss_mask, row.logprobs, row.versions, row.advantages, strict=True
        )
        if kept
    ]
    sampled = [values for t in turns for values in zip(t.token_ids, t.logprobs, t.versions, strict=True)]
    assert trained == [(*values, advantage) for values, advantage in zip(sampled, advantages, strict=True)]
    for row in rows:
        assert not row.loss_mask[0]
        assert all(
            kept or (logprob, version, advantage) == (0.0, -1, 0.0)
            for kept, logprob, version, advantage in zip(
                row.loss_mask, row.logprobs, row.versions, row.advantages, strict=True
            )
        )
