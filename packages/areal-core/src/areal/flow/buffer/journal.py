"""The journal: one SQLite file (WAL) that says what was issued, finished, consumed, published and saved.

A process that is killed loses nothing that was committed; a machine that loses power may lose the last
transactions of the operating system's cache, except checkpoints, which are synced before the pointer moves.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal.contracts.messages import Group, Prompt, StepReport, Trajectory, Version
from areal.errors import JournalError
from areal.flow.buffer.codec import decode_prompt, decode_trajectory, encode_prompt, encode_trajectory
from areal.flow.buffer.compaction import Compaction
from areal.flow.buffer.view import JournalView

_log = logging.getLogger(__name__)

Fate = Literal["trained", "stale", "passed_over"]
"""Why a group left the buffer: a step took it, it was too old, or the algorithm did not want it."""


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


class Journal(JournalView):
    """The run's memory. Invariant: what a method has returned from survives the death of every process.

    Only the controller writes, and each method is one transaction.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        """Raises JournalError in one sentence; an older journal is brought up to date, a damaged one stays as it is."""
        if create and path.exists() and path.stat().st_size:
            raise JournalError(f"{path.parent} has a journal already; go on with it with areal resume")
        super().__init__(path, "create" if create else "write")
        self._compaction = Compaction(self._database)

    def issued(self, groups: Iterable[Issued]) -> None:
        rows = [(g.number, g.environment, g.prompt_index, g.num_samples, g.issued_version, time.time()) for g in groups]
        with self._database.transaction() as db:
            db.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, NULL)", rows)

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
                *encode_trajectory(t),
            )
            for t in trajectories
        ]
        texts = [(encode_prompt(prompt), number) for number, prompt in prompts]
        with self._database.transaction() as db:
            db.executemany("UPDATE groups SET prompt = ? WHERE number = ?", texts)
            db.executemany(_KEEP_FIRST, rows)

    def dropped(self, numbers: Sequence[int], step: int, fate: Fate = "stale") -> None:
        """Record groups that left the buffer untrained while `step` was being gathered."""
        with self._database.transaction() as db:
            db.executemany("INSERT INTO consumed VALUES (?, ?, ?)", [(number, step, fate) for number in numbers])

    def stepped(self, report: StepReport) -> None:
        """Record a training step and, in the same transaction, that it consumed its groups."""
        with self._database.transaction() as db:
            db.executemany("INSERT INTO consumed VALUES (?, ?, 'trained')", [(n, report.step) for n in report.groups])
            row = (report.step, report.version, time.time(), json.dumps(dict(report.metrics)))
            db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", row)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._database.transaction() as db:
            row = (step, time.time(), json.dumps(dict(metrics)))
            db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", row)

    def published(self, version: Version) -> None:
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (version, time.time()))

    def lost(self, worker: str, reason: str, step: int) -> None:
        """Record that a worker was lost when `step` training steps were done."""
        kind = worker.rpartition("-")[0] or worker
        with self._database.transaction() as db:
            row = (time.time(), step, worker, kind, reason)
            db.execute("INSERT INTO failures (at, step, worker, kind, reason) VALUES (?, ?, ?, ?, ?)", row)

    def checkpointed(self, step: int, path: str) -> None:
        """Move the pointer: everything `path` names is on disk already."""
        with self._database.transaction(durable=True) as db:
            db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (step, path, time.time()))

    def forget_checkpoint(self, step: int) -> None:
        with self._database.transaction() as db:
            db.execute("DELETE FROM checkpoints WHERE step = ?", (step,))

    def compact(self, oldest_needed_step: int, max_bytes: int) -> bool:
        """Do a little, some tens of ms at most, to bring the journal below `max_bytes`; return whether there is more.

        Samples consumed by steps up to `oldest_needed_step`, the oldest kept checkpoint's, lose their tokens.
        """
        return self._compaction.slice(oldest_needed_step, max_bytes)

    def recover(self) -> Recovery:
        """Go back to the last complete checkpoint: what later steps consumed is unconsumed again.

        A sample whose row is damaged is set aside in the table `damaged` and missing from then on. All that is open
        is returned, also what a buffer of this process holds already. Raises JournalError when there is no complete
        checkpoint.
        """
        saved = self.checkpoints()
        if not saved:
            raise JournalError(
                f"{self._database.path.parent} has no complete checkpoint; start the run anew with areal run"
            )
        step, checkpoint = saved[-1]
        with self._database.transaction() as db:
            for table in ("consumed", "steps", "evaluations"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            db.execute("DELETE FROM versions WHERE version > ?", (step,))
        groups = [self._open_group(*row) for row in self._database.rows(_OPEN_GROUPS)]
        ((num_issued,),) = self._database.rows("SELECT count(*) FROM groups")
        ((num_dropped,),) = self._database.rows("SELECT count(*) FROM consumed WHERE fate != 'trained'")
        return Recovery(
            step=step,
            checkpoint=checkpoint,
            complete=tuple(group for _, missing, group in groups if not missing and group is not None),
            unfinished=tuple((issued, missing) for issued, missing, _ in groups if missing),
            num_issued=num_issued,
            num_dropped=num_dropped,
        )

    def _open_group(
        self, number: int, environment: str, index: int, num_samples: int, version: int, text: str | None
    ) -> tuple[Issued, tuple[int, ...], Group | None]:
        issued = Issued(
            number=number,
            environment=environment,
            prompt_index=index,
            num_samples=num_samples,
            issued_version=version,
        )
        there = self._readable(number)
        prompt = self._prompt(number, text)
        if prompt is None and len(there) == num_samples:
            # Whoever makes a sample brings the prompt along.
            self._set_aside(number, max(there), "its prompt is not there and comes with a new sample")
            del there[max(there)]
        missing = tuple(sample for sample in range(num_samples) if sample not in there)
        if missing or prompt is None:
            return issued, missing, None
        return issued, missing, Group(number=number, prompt=prompt, trajectories=tuple(there.values()))

    def _readable(self, number: int) -> dict[int, Trajectory]:
        """Return a group's trajectories by sample, in order; damaged rows are set aside."""
        there: dict[int, Trajectory] = {}
        for sample, body, tokens in self._samples(number):
            try:
                there[sample] = decode_trajectory(number, sample, body, tokens)
            except JournalError as error:
                self._set_aside(number, sample, str(error))
        return there

    def _prompt(self, number: int, text: str | None) -> Prompt | None:
        try:
            return None if text is None else decode_prompt(text)
        except JournalError as error:
            with self._database.transaction() as db:
                db.execute(_SET_PROMPT_ASIDE, (time.time(), str(error), number))
                db.execute("UPDATE groups SET prompt = NULL WHERE number = ?", (number,))
            _log.warning("%s; it was set aside in the table damaged and is made anew", error)
            return None

    def _set_aside(self, number: int, sample: int, reason: str) -> None:
        with self._database.transaction() as db:
            db.execute(_SET_SAMPLE_ASIDE, (time.time(), reason, number, sample))
            db.execute("DELETE FROM trajectories WHERE group_number = ? AND sample = ?", (number, sample))
        _log.warning("sample %d/%d was set aside in the table damaged and is made anew: %s", number, sample, reason)


_KEEP_FIRST = """
INSERT OR IGNORE INTO trajectories
(group_number, sample, status, reward, min_version, num_tokens, finished_at, body, tokens)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_OPEN_GROUPS = """
SELECT number, environment, prompt_index, num_samples, issued_version, prompt FROM groups
WHERE number NOT IN (SELECT group_number FROM consumed) ORDER BY number
"""
_SET_SAMPLE_ASIDE = """
INSERT INTO damaged (at, reason, group_number, sample, body, tokens)
SELECT ?, ?, group_number, sample, body, tokens FROM trajectories WHERE group_number = ? AND sample = ?
"""
_SET_PROMPT_ASIDE = """
INSERT INTO damaged (at, reason, group_number, body) SELECT ?, ?, number, prompt FROM groups WHERE number = ?
"""
