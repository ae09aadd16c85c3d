"""One SQLite file (WAL): opened, read and written; whatever is wrong with it is one sentence."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from areal.errors import JournalError
from areal.flow.buffer.tables import CREATE, FROM_1, SCHEMA_VERSION, TABLES, TABLES_OF_1

Mode = Literal["create", "write", "read"]

LOCK_WAIT_S = 5.0
"""Longest wait for another process that has the database locked."""
WAL_BYTES = 16 * 2**20
"""What the -wal file keeps on disk when its content has moved into the database."""


class Database:
    """Invariant: a failure is a JournalError of one sentence, and a transaction that fails leaves nothing."""

    def __init__(self, path: Path, mode: Mode) -> None:
        """Open the file; a new one is made only in mode create, and in mode read nothing is written."""
        self.path = path
        self._again = "start anew with: areal run" if mode == "create" else f"go on with: areal resume {path.parent}"
        try:
            self._db = self._connect(mode)
        except sqlite3.Error as error:
            raise self._sentence(error, "used") from error
        try:
            self._prepare(mode)
            self.schema = self._check(mode)
            self._again = f"go on with: areal resume {path.parent}"
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise self._sentence(error, "used") from error
            raise

    def _connect(self, mode: Mode) -> sqlite3.Connection:
        if mode == "read":
            return _read_only(self.path)
        return sqlite3.connect(self.path, timeout=LOCK_WAIT_S, isolation_level=None)

    def _prepare(self, mode: Mode) -> None:
        # Damaged text is found where it is decoded, row by row, and not here for all rows at once.
        self._db.text_factory = _text
        if mode == "read":
            return
        if mode == "create":
            self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # has no effect later than here
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        if mode == "create":
            self._script(CREATE)

    def _check(self, mode: Mode) -> int:
        """Return the schema, brought up to date in mode write; JournalError for what cannot be used."""
        there = {name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not there:
            raise JournalError(
                f"the journal {self.path} is empty: the run ended before its first step; start it anew with areal run"
            )
        self._check_tables(there, TABLES_OF_1)
        found = self.rows("SELECT value FROM meta WHERE key = 'schema'")
        schema = str(found[0][0]) if found else "none"
        if schema not in ("1", str(SCHEMA_VERSION)):
            raise JournalError(
                f"the journal {self.path} has schema {schema}, this AReaL reads 1 and {SCHEMA_VERSION}; use the AReaL "
                "that wrote it"
            )
        if schema != "1":
            self._check_tables(there, TABLES)
        if mode == "write":
            self._check_pages()
            if schema == "1":
                self._script(FROM_1)
                schema = str(SCHEMA_VERSION)
        return int(schema)

    def _check_tables(self, there: Collection[str], wanted: Sequence[str]) -> None:
        if missing := [name for name in wanted if name not in there]:
            raise self._damaged(f"it has no table {', '.join(missing)}")

    def _check_pages(self) -> None:
        """Look at every page before a run goes on: damage that is met in the middle of a run costs more."""
        ((found,),) = self.rows("PRAGMA quick_check(1)")
        if found != "ok":
            raise self._damaged(str(found).splitlines()[-1])

    def _script(self, statements: str) -> None:
        with self.transaction() as db:
            for statement in filter(str.strip, statements.split(";")):
                db.execute(statement)

    def rows(self, query: str, *values: object) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._sentence(error, "read") from error

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Generator[sqlite3.Connection]:
        """Run what is inside as one transaction; `durable`: on disk, and not with the operating system, afterwards."""
        try:
            if durable:
                self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if durable:
                    self._db.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error as error:
            raise self._sentence(error, "written") from error

    def pages(self) -> tuple[int, int, int]:
        """Return (pages, those of them that are free, bytes of a page)."""
        return tuple(self.rows(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size"))

    def give_back(self, num_pages: int) -> None:
        """Shorten the file by so many of its free pages; a journal of schema 1 keeps them for later rows."""
        with self.transaction() as db:
            db.execute(f"PRAGMA incremental_vacuum({num_pages})").fetchall()

    def shorten_wal(self) -> None:
        """Bring what the -wal file holds into the database and empty it, unless somebody is reading it."""
        self._db.execute("PRAGMA busy_timeout=0")
        try:
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._db.execute(f"PRAGMA busy_timeout={int(LOCK_WAIT_S * 1000)}")

    def close(self) -> None:
        self._db.close()

    def _damaged(self, what: str) -> JournalError:
        return JournalError(
            f"the journal {self.path} is damaged: {what}; nothing in it was changed; put a copy of it back, or start a "
            f"new run from the newest checkpoint in {self.path.parent / 'checkpoints'}: model.path=CHECKPOINT/model "
            "(sqlite3's .recover reads what is left)"
        )

    def _sentence(self, error: sqlite3.Error, doing: str) -> JournalError:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "no such table" in str(error):
            return self._damaged(str(error))
        why = next((what for start, what in _WHY.items() if name.startswith(start)), "")
        hint = f"; {why}, and {self._again}" if why else ""
        return JournalError(f"the journal {self.path} cannot be {doing}: {error}{hint}")


_WHY = {
    "SQLITE_FULL": "nothing that was journalled is lost; make room on its disk",
    "SQLITE_IOERR": "nothing that was journalled is lost; look whether its disk is full or failing",
    "SQLITE_READONLY": "allow writing in its folder",
    "SQLITE_CANTOPEN": "see that its folder is there and can be written",
    "SQLITE_BUSY": f"another process holds it locked for more than {LOCK_WAIT_S:g} s (a database browser, sqlite3 in a "
    "transaction); end that",
}
"""What to do, by the beginning of SQLite's name for the error."""


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _read_only(path: Path) -> sqlite3.Connection:
    name = f"file:{quote(str(path))}?mode=ro"
    db = sqlite3.connect(name, uri=True, timeout=LOCK_WAIT_S, isolation_level=None)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        db.close()
        wal = path.with_name(f"{path.name}-wal")
        if not error.sqlite_errorname.startswith("SQLITE_CANTOPEN") or (wal.exists() and wal.stat().st_size):
            raise
        # Reading a WAL database needs a file beside it; where none can be made, nobody writes either.
        return sqlite3.connect(f"{name}&immutable=1", uri=True, isolation_level=None)
    return db
