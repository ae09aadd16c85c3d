"""Keeping the journal small: samples that no kept checkpoint could need lose their tokens, oldest first."""

from __future__ import annotations

import time
from collections.abc import Iterator

from areal.flow.buffer.codec import stripped
from areal.flow.buffer.database import WAL_BYTES, Database

SLICE_S = 0.01
"""Work of one call; the controller has other things to do. The commit after it comes on top."""
PAGES_AT_ONCE = 64
FREE_SHARE = 1 / 16
"""Share of the file that stays free for the next samples; shortening the file to lengthen it again is work."""
_START = (-1, -1)

_NEXT_STEP = "SELECT min(step) FROM consumed WHERE step > ? AND step <= ?"
_NEXT_ROWS = """
SELECT group_number, sample, CASE WHEN tokens IS NULL THEN body END FROM trajectories
WHERE group_number IN (SELECT group_number FROM consumed WHERE step = ?) AND (group_number, sample) > (?, ?)
ORDER BY group_number, sample LIMIT 64
"""
# A new row, and not an update: what is left is small, and would keep the page of its own that the whole row had.
_WITHOUT_TOKENS = """
INSERT OR REPLACE INTO trajectories
(group_number, sample, status, reward, min_version, num_tokens, finished_at, body, tokens)
SELECT group_number, sample, status, reward, min_version, num_tokens, finished_at, coalesce(?, body), NULL
FROM trajectories WHERE group_number = ? AND sample = ?
"""
_NOTE = "INSERT OR REPLACE INTO meta VALUES ('compacted', ?)"


class Compaction:
    """Invariant: only samples of steps up to the oldest kept checkpoint lose anything, and nothing but their tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._done_step = compacted_step(database)
        self._done_row = _START

    def slice(self, oldest_needed_step: int, max_bytes: int) -> bool:
        """Do a little of the work; return whether there is more.

        `oldest_needed_step`: step of the oldest checkpoint that is kept.
        """
        until = time.perf_counter() + SLICE_S
        if self._is_too_big(max_bytes) and self._strip(oldest_needed_step, max_bytes, until):
            return True
        if self._give_back(until):
            return True
        wal = self._database.path.with_name(f"{self._database.path.name}-wal")
        if wal.exists() and wal.stat().st_size > WAL_BYTES:
            self._database.shorten_wal()
        return False

    def _is_too_big(self, max_bytes: int) -> bool:
        pages, free, size = self._database.pages()
        return (pages - free) * size > max_bytes

    def _strip(self, last_step: int, max_bytes: int, until: float) -> bool:
        """Take tokens out until there are few enough, the time is over, or none is left (False)."""
        with self._database.transaction() as db:
            for number, sample, body in self._rows(last_step):
                short = None if body is None else stripped(body)
                if body is None or short is not None:
                    db.execute(_WITHOUT_TOKENS, (short, number, sample))
                if time.perf_counter() > until or not self._is_too_big(max_bytes):
                    return True
        return False

    def _rows(self, last_step: int) -> Iterator[tuple[int, int, str | None]]:
        """Yield (group, sample, body of a row without `tokens`), oldest first, from where the last call stopped."""
        while True:
            ((step,),) = self._database.rows(_NEXT_STEP, self._done_step, last_step)
            if step is None:
                return
            while rows := self._database.rows(_NEXT_ROWS, step, *self._done_row):
                for number, sample, body in rows:
                    self._done_row = (number, sample)
                    yield number, sample, body
            self._done_step, self._done_row = step, _START
            self._database.rows(_NOTE, str(step))

    def _give_back(self, until: float) -> bool:
        """Shorten the file by its free pages; return whether there are more to give back."""
        while True:
            pages, free, _ = self._database.pages()
            if free <= pages * FREE_SHARE:
                return False
            self._database.give_back(min(PAGES_AT_ONCE, free))
            if self._database.pages()[0] == pages:  # a journal of schema 1 cannot become shorter
                return False
            if time.perf_counter() > until:
                return True


def compacted_step(database: Database) -> int:
    """Return the step up to which all samples have lost their tokens."""
    rows = database.rows("SELECT value FROM meta WHERE key = 'compacted'")
    return int(rows[0][0]) if rows else 0
