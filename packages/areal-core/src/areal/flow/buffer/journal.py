"""The journal: one SQLite file (WAL) that says what was issued, finished, consumed, published and saved.

A process that is killed loses nothing that was committed; a machine that loses power may lose the last
transactions of the operating system's cache, except checkpoints, which are synced before the pointer moves.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal.contracts.messages import Group, Prompt, StepReport, Trajectory, Version
from areal.errors import JournalError
from areal.flow.buffer.codec import decode_prompt, decode_trajectory, encode_prompt, encode_trajectory

Fate = Literal["trained", "stale", "passed_over"]
"""Why a group left the buffer: a step took it, it was too old, or the algorithm did not want it."""

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, environment TEXT NOT NULL, prompt_index INTEGER NOT NULL,
    num_samples INTEGER NOT NULL, issued_version INTEGER NOT NULL, issued_at REAL NOT NULL, prompt TEXT);
CREATE TABLE trajectories (
    group_number INTEGER NOT NULL REFERENCES groups, sample INTEGER NOT NULL, status TEXT NOT NULL, reward REAL,
    min_version INTEGER, num_tokens INTEGER NOT NULL, finished_at REAL NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (group_number, sample)) WITHOUT ROWID;
CREATE TABLE consumed (
    group_number INTEGER PRIMARY KEY REFERENCES groups, step INTEGER NOT NULL, fate TEXT NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, finished_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, finished_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE versions (version INTEGER PRIMARY KEY, committed_at REAL NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, completed_at REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A group whose prompt was handed out. Invariant: `number` is its place in the run's order of prompts."""

    number: int
    environment: str
    prompt_index: int
    num_samples: int
    issued_version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a resumed run starts from. Invariant: complete and unfinished groups are all that no kept step consumed."""

    step: int
    checkpoint: str
    complete: tuple[Group, ...]
    """Groups with all their trajectories, oldest first."""
    unfinished: tuple[tuple[Issued, tuple[int, ...]], ...]
    """Groups with the samples that are still missing."""
    num_issued: int
    num_dropped: int


class Journal:
    """The run's memory. Invariant: what a method has returned from survives the death of every process.

    Only the controller writes, and each method is one transaction.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        if not create and not path.exists():
            raise JournalError(
                f"{path.parent} has no journal, so there is nothing to resume; start a run with areal run"
            )
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if create:
                self._db.executescript(
                    f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}'); COMMIT;"
                )
        except sqlite3.Error as error:
            raise JournalError(f"the journal {path} cannot be used: {error}") from error
        self._check_schema()

    def _check_schema(self) -> None:
        found = self._rows("SELECT value FROM meta WHERE key = 'schema'")
        if found != [(str(SCHEMA_VERSION),)]:
            there = found[0][0] if found else "none"
            raise JournalError(f"the journal {self._path} has schema {there}, this AReaL reads {SCHEMA_VERSION}")

    def issued(self, groups: Iterable[Issued]) -> None:
        rows = [(g.number, g.environment, g.prompt_index, g.num_samples, g.issued_version, time.time()) for g in groups]
        with self._transaction():
            self._db.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, NULL)", rows)

    def finished(self, prompts: Iterable[tuple[int, Prompt]], trajectories: Iterable[Trajectory]) -> None:
        """Record trajectories, and the prompt of each group; a trajectory that is known already is ignored."""
        now = time.time()
        rows = [
            (
                t.group,
                t.sample,
                t.outcome.status,
                t.outcome.reward,
                t.min_version,
                t.num_tokens,
                now,
                encode_trajectory(t),
            )
            for t in trajectories
        ]
        texts = [(encode_prompt(prompt), number) for number, prompt in prompts]
        with self._transaction():
            self._db.executemany("UPDATE groups SET prompt = ? WHERE number = ?", texts)
            self._db.executemany("INSERT OR IGNORE INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def dropped(self, numbers: Sequence[int], step: int, fate: Fate = "stale") -> None:
        """Record groups that left the buffer untrained while `step` was being gathered."""
        with self._transaction():
            self._db.executemany("INSERT INTO consumed VALUES (?, ?, ?)", [(number, step, fate) for number in numbers])

    def stepped(self, report: StepReport) -> None:
        """Record a training step and, in the same transaction, that it consumed its groups."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO consumed VALUES (?, ?, 'trained')", [(n, report.step) for n in report.groups]
            )
            row = (report.step, report.version, time.time(), json.dumps(dict(report.metrics)))
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", row)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._transaction():
            row = (step, time.time(), json.dumps(dict(metrics)))
            self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", row)

    def published(self, version: Version) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (version, time.time()))

    def checkpointed(self, step: int, path: str) -> None:
        """Move the pointer: everything `path` names is on disk already."""
        self._db.execute("PRAGMA synchronous=FULL")
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (step, path, time.time()))
        self._db.execute("PRAGMA synchronous=NORMAL")

    def checkpoints(self) -> list[tuple[int, str]]:
        """Return (step, path) of the complete checkpoints, oldest first."""
        return self._rows("SELECT step, path FROM checkpoints ORDER BY step")

    def forget_checkpoint(self, step: int) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM checkpoints WHERE step = ?", (step,))

    def metrics(self, of: Literal["steps", "evaluations"] = "steps") -> list[tuple[int, Mapping[str, float]]]:
        """Return (step, metrics) of every training step, or of every evaluation, in order."""
        return [(step, json.loads(text)) for step, text in self._rows(f"SELECT step, metrics FROM {of} ORDER BY step")]

    def recover(self) -> Recovery:
        """Go back to the last complete checkpoint: what later steps consumed is unconsumed again.

        Raises JournalError when there is no complete checkpoint.
        """
        saved = self.checkpoints()
        if not saved:
            raise JournalError(f"{self._path.parent} has no complete checkpoint; start the run anew with areal run")
        step, checkpoint = saved[-1]
        with self._transaction():
            for table in ("consumed", "steps", "evaluations"):
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            self._db.execute("DELETE FROM versions WHERE version > ?", (step,))
        groups = [self._open_group(*row) for row in self._rows(_OPEN_GROUPS)]
        ((num_issued,),) = self._rows("SELECT count(*) FROM groups")
        ((num_dropped,),) = self._rows("SELECT count(*) FROM consumed WHERE fate != 'trained'")
        return Recovery(
            step=step,
            checkpoint=checkpoint,
            complete=tuple(group for _, missing, group in groups if not missing and group is not None),
            unfinished=tuple((issued, missing) for issued, missing, _ in groups if missing),
            num_issued=num_issued,
            num_dropped=num_dropped,
        )

    def _open_group(
        self, number: int, environment: str, index: int, num_samples: int, version: int, prompt: str | None
    ) -> tuple[Issued, tuple[int, ...], Group | None]:
        issued = Issued(
            number=number,
            environment=environment,
            prompt_index=index,
            num_samples=num_samples,
            issued_version=version,
        )
        trajectories = self.trajectories(number)
        there = {trajectory.sample for trajectory in trajectories}
        missing = tuple(sample for sample in range(num_samples) if sample not in there)
        if missing or prompt is None:
            return issued, missing, None
        return issued, missing, Group(number=number, prompt=decode_prompt(prompt), trajectories=trajectories)

    def trajectories(self, number: int) -> tuple[Trajectory, ...]:
        """Return what is finished of one group, in the order of its samples."""
        rows = self._rows("SELECT sample, body FROM trajectories WHERE group_number = ? ORDER BY sample", number)
        return tuple(decode_trajectory(number, sample, body) for sample, body in rows)

    def close(self) -> None:
        self._db.close()

    def _rows(self, query: str, *values: object) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self._path} cannot be read: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self._path} cannot be written: {error}") from error


_OPEN_GROUPS = """
SELECT number, environment, prompt_index, num_samples, issued_version, prompt FROM groups
WHERE number NOT IN (SELECT group_number FROM consumed) ORDER BY number
"""
