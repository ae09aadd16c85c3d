"""Trajectories to training rows: turns that continue each other become one row, tokens stay as they were made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from areal.contracts.messages import Completion, Group, Row, Trajectory, Version

Advantage = float | Sequence[float]
T = TypeVar("T")


def rows_of(group: Group, advantages: Sequence[Advantage]) -> list[Row]:
    """Return the rows of the group's ok trajectories, with one advantage (or one a sampled token) for each."""
    rows: list[Row] = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        if trajectory.outcome.status == "ok" and trajectory.num_tokens:
            rows += _trajectory_rows(trajectory, _per_token(trajectory, advantage))
    return [replace(row, group=group.number) for row in rows]


def row_of(completion: Completion) -> Row:
    """Return one completion as a row whose sampled tokens count, without advantage."""
    return _extended(_EMPTY, completion, (0.0,) * len(completion.token_ids))


def mask_stale(row: Row, oldest: Version) -> tuple[Row, int]:
    """Take tokens of versions before `oldest` out of the loss; return the row and how many were taken out."""
    keep = tuple(trained and version >= oldest for trained, version in zip(row.loss_mask, row.versions, strict=True))
    taken = sum(row.loss_mask) - sum(keep)
    if not taken:
        return row, 0
    masked = replace(
        row,
        loss_mask=keep,
        logprobs=_where(keep, row.logprobs, 0.0),
        versions=_where(keep, row.versions, -1),
        advantages=_where(keep, row.advantages, 0.0),
    )
    return masked, taken


def _where(keep: Sequence[bool], values: Sequence[T], otherwise: T) -> tuple[T, ...]:
    return tuple(value if kept else otherwise for kept, value in zip(keep, values, strict=True))


def has_advantage(row: Row) -> bool:
    return any(row.advantages)


def _per_token(trajectory: Trajectory, advantage: Advantage) -> Sequence[float]:
    if isinstance(advantage, Sequence):
        if len(advantage) != trajectory.num_tokens:
            raise ValueError(
                f"trajectory {trajectory.uid} has {trajectory.num_tokens} tokens and got {len(advantage)} advantages"
            )
        return advantage
    return [advantage] * trajectory.num_tokens


def _trajectory_rows(trajectory: Trajectory, advantages: Sequence[float]) -> list[Row]:
    rows: list[Row] = []
    offset = 0
    for turn in trajectory.turns:
        share = tuple(advantages[offset : offset + len(turn.token_ids)])
        offset += len(turn.token_ids)
        if not turn.token_ids:
            continue
        if rows and turn.prompt_ids[: len(rows[-1].token_ids)] == rows[-1].token_ids:
            rows[-1] = _extended(rows[-1], turn, share)
        else:
            rows.append(_extended(_EMPTY, turn, share))
    return rows


def _extended(row: Row, turn: Completion, advantages: tuple[float, ...]) -> Row:
    new = turn.prompt_ids[len(row.token_ids) :]
    num_new, num_said = len(new), len(turn.token_ids)
    return Row(
        token_ids=row.token_ids + new + turn.token_ids,
        loss_mask=row.loss_mask + (False,) * num_new + (True,) * num_said,
        logprobs=row.logprobs + (0.0,) * num_new + turn.logprobs,
        versions=row.versions + (-1,) * num_new + turn.versions,
        advantages=row.advantages + (0.0,) * num_new + advantages,
    )


_EMPTY = Row(token_ids=(), loss_mask=(), logprobs=(), versions=(), advantages=())
