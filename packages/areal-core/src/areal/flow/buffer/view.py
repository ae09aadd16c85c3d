"""The journal as a reader sees it: nothing here writes, and a run may be writing meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal.contracts.messages import Group, Trajectory
from areal.errors import JournalError
from areal.flow.buffer.codec import decode_prompt, decode_trajectory
from areal.flow.buffer.database import Database, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that was lost. Invariant: written when it was noticed, and never taken back."""

    at: float
    """Seconds since 1970."""
    step: int
    """Training steps that were done by then."""
    worker: str
    kind: str
    """``engine``, ``rollout``, ``trainer``: the worker's name without its number."""
    reason: str


class JournalView:
    """Invariant: what it returns was committed by the run's controller."""

    def __init__(self, path: Path, mode: Mode = "read") -> None:
        """Raises JournalError in one sentence when there is no journal, or none that can be read."""
        if mode != "create" and not path.exists():
            to = "look into" if mode == "read" else "resume"
            raise JournalError(f"{path.parent} has no journal, so there is nothing to {to}; start a run with areal run")
        self._database = Database(path, mode)
        # A journal of schema 1 that is only read stays as it is.
        self._tokens = "NULL" if self._database.schema == 1 else "tokens"

    def checkpoints(self) -> list[tuple[int, str]]:
        """Return (step, path) of the complete checkpoints, oldest first."""
        return self._database.rows("SELECT step, path FROM checkpoints ORDER BY step")

    def metrics(self, of: Literal["steps", "evaluations"] = "steps") -> list[tuple[int, Mapping[str, float]]]:
        """Return (step, metrics) of every training step, or of every evaluation, in order."""
        rows = self._database.rows(f"SELECT step, metrics FROM {of} ORDER BY step")
        return [(step, _numbers(of, step, text)) for step, text in rows]

    def losses(self) -> list[Loss]:
        """Return the workers that were lost, in the order in which it was noticed."""
        if self._database.schema == 1:
            return []
        rows = self._database.rows("SELECT at, step, worker, kind, reason FROM failures ORDER BY id")
        return [
            Loss(at=at, step=step, worker=worker, kind=kind, reason=reason) for at, step, worker, kind, reason in rows
        ]

    def batch(self, step: int) -> tuple[Group, ...]:
        """Return the groups that a training step consumed, as they were handed to the trainer.

        Raises JournalError when one of them is damaged or has lost its tokens.
        """
        rows = self._database.rows(
            "SELECT number, num_samples, prompt FROM groups WHERE number IN "
            "(SELECT group_number FROM consumed WHERE step = ? AND fate = 'trained') ORDER BY number",
            step,
        )
        groups = [
            Group(number=number, prompt=decode_prompt(prompt), trajectories=self.trajectories(number))
            for number, _, prompt in rows
        ]
        for group, (number, num_samples, _) in zip(groups, rows, strict=True):
            if len(group.trajectories) != num_samples:
                raise JournalError(
                    f"group {number} of step {step} has {len(group.trajectories)} samples in the journal and was "
                    f"trained with {num_samples}; somebody removed rows from the table trajectories"
                )
        return tuple(groups)

    def trajectories(self, number: int) -> tuple[Trajectory, ...]:
        """Return what is finished of one group, in the order of its samples."""
        return tuple(decode_trajectory(number, *row) for row in self._samples(number))

    def _samples(self, number: int) -> list[tuple[int, str, bytes | None]]:
        """Return (sample, body, tokens) of one group's rows."""
        query = f"SELECT sample, body, {self._tokens} FROM trajectories WHERE group_number = ? ORDER BY sample"
        return self._database.rows(query, number)

    def close(self) -> None:
        self._database.close()


def _numbers(table: str, step: int, text: Any) -> Mapping[str, float]:
    try:
        return json.loads(text)
    except (ValueError, TypeError) as error:
        raise JournalError(
            f"the metrics of step {step} in the journal's table {table} are damaged ({error})"
        ) from error
