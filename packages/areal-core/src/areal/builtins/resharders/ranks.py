"""The ranks of one trainer meet in a folder to write one version together.

    owner           locked by the lead, the first rank that has pieces, as long as it lives
    open            what the lead wants written now, and where
    rank-3          locked by rank 3 as long as it lives
    rank-3.wrote    its part is there, or why it never will be
    verdict         the version is published, or why it was given up

Each file appears whole and is replaced by the next version's; a token tells the attempts apart. The trainer's own
process group has no part in this: it may be the very thing that broke.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areal.builtins.resharders.locks import holder_died, own
from areal.builtins.resharders.wire import Deadline
from areal.contracts.messages import Version
from areal.errors import TransferFailed

# The ranks of one trainer come at nearly the same time, and on shared memory one update is some 50 ms.
MEET_POLL_S = 0.0002


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    """Make a small file appear whole, in place of the one before. Raises OSError."""
    draft = path.with_name(f"{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    draft.write_text(json.dumps(told), encoding="utf-8")
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return what a small file says; nothing when it is not there."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


class Lead:
    """The first rank's side. Invariant: every attempt ends with a verdict, however it ends."""

    def __init__(self, folder: Path, others: Sequence[int]) -> None:
        self._folder = folder
        self._others = others
        self._version: Version = -1
        self._token = ""

    @contextmanager
    def attempt(self, version: Version) -> Iterator[None]:
        """Publish inside this block; what it raises is told to the other ranks."""
        self._version, self._token = version, uuid.uuid4().hex
        failed = ""
        try:
            yield
        except BaseException as error:
            failed = str(error) or type(error).__name__
            raise
        finally:
            if self._others:
                self._end(failed)

    def invite(self, details: Mapping[str, Any]) -> None:
        """Have the other ranks begin to write."""
        if self._others:
            write_json(self._folder / "open", {"version": self._version, "token": self._token, "details": details})

    def wait(self, deadline: Deadline) -> None:
        """Return when all other ranks have written; TransferFailed names those that failed, died or are late."""
        left = set(self._others)

        def look() -> bool | None:
            left.difference_update([rank for rank in left if self._has_written(rank)])
            return True if not left else None

        if not deadline.poll(look, MEET_POLL_S):
            raise TransferFailed(
                f"trainer rank {', '.join(map(str, sorted(left)))} did not write version {self._version}"
                f" within {deadline.seconds:g} s"
            )

    def _has_written(self, rank: int) -> bool:
        seat = self._folder / f"rank-{rank}"
        is_dead = holder_died(seat)  # looked at first: what it had written before its death counts
        told = read_json(seat.with_suffix(".wrote"))
        if told.get("token") != self._token:
            if is_dead:
                raise TransferFailed(f"trainer rank {rank} died before its part of version {self._version} was written")
            return False
        if told["failed"]:
            raise TransferFailed(f"trainer rank {rank} gave up version {self._version}: {told['failed']}")
        return True

    def _end(self, failed: str) -> None:
        with suppress(OSError):
            (self._folder / "open").unlink(missing_ok=True)
            write_json(self._folder / "verdict", {"version": self._version, "token": self._token, "failed": failed})


class Seat:
    """Another rank's side. Invariant: the lead learns of every part that was begun, or of its rank's death."""

    def __init__(self, folder: Path, rank: int, lead: int) -> None:
        self._folder = folder
        self._lead = lead
        self._rank = rank
        self._handle: int | None = None
        self._seen: set[str] = set()
        self._token = ""

    def join(self, version: Version, deadline: Deadline) -> dict[str, Any]:
        """Wait for the lead's invitation and return its details; TransferFailed when there will be none."""
        found = deadline.poll(lambda: self._invitation(version), MEET_POLL_S)
        if found is None:
            raise TransferFailed(
                f"trainer rank {self._lead} did not begin version {version} within {deadline.seconds:g} s,"
                f" so rank {self._rank} could not send its part"
            )
        self._token = found["token"]
        self._seen.add(self._token)
        self._sit(version)
        return found["details"]

    @contextmanager
    def writing(self, version: Version) -> Iterator[None]:
        """Write this rank's part inside the block; the lead is told how that went."""
        failed = ""
        try:
            yield
        except BaseException as error:
            failed = str(error) or type(error).__name__
            if isinstance(error, TransferFailed) or not isinstance(error, Exception):
                raise
            raise TransferFailed(f"trainer rank {self._rank} gave up version {version}: {failed}") from error
        finally:
            with suppress(OSError):
                write_json(self._path.with_suffix(".wrote"), {"token": self._token, "failed": failed})

    def wait(self, version: Version, deadline: Deadline) -> None:
        """Return when the version is published; TransferFailed when it was given up."""

        def look() -> dict[str, Any] | None:
            told = read_json(self._folder / "verdict")
            if told.get("token") == self._token:
                return told
            self._check_lead(version)
            return None

        told = deadline.poll(look)
        if told is None:
            raise TransferFailed(
                f"trainer rank {self._lead} did not publish version {version} within {deadline.seconds:g} s"
            )
        self._raise_failure(version, told)

    def close(self) -> None:
        """Give the seat back. Idempotent."""
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    @property
    def _path(self) -> Path:
        return self._folder / f"rank-{self._rank}"

    def _sit(self, version: Version) -> None:
        if self._handle is not None:
            return
        try:
            self._handle = own(self._path)
        except OSError as error:
            raise TransferFailed(
                f"trainer rank {self._rank} cannot write into {self._folder} for version {version}: {error.strerror}"
            ) from error
        if self._handle is None:
            raise TransferFailed(
                f"another sender of trainer rank {self._rank} is alive and holds {self._path}; close it first"
            )

    def _invitation(self, version: Version) -> dict[str, Any] | None:
        told = read_json(self._folder / "open")
        if told.get("version") == version and told["token"] not in self._seen:
            return told
        told = read_json(self._folder / "verdict")
        if told.get("version") == version and told["token"] not in self._seen:
            self._seen.add(told["token"])  # ends one wait, and not that for the next attempt
            self._raise_failure(version, told)
        self._check_lead(version)
        return None

    def _raise_failure(self, version: Version, told: Mapping[str, Any]) -> None:
        if told["failed"]:
            raise TransferFailed(f"trainer rank {self._lead} gave up version {version}: {told['failed']}")

    def _check_lead(self, version: Version) -> None:
        # What a dead lead left may have been swept away meanwhile.
        is_swept = self._handle is not None and not self._folder.is_dir()
        if is_swept or holder_died(self._folder / "owner"):
            raise TransferFailed(f"trainer rank {self._lead} died before version {version} was published")
