"""Folders in which one sender publishes versions by name and receivers wait for them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from areal.builtins.resharders.ranks import read_json, write_json
from areal.builtins.resharders.wire import FIRST_POLL_S, Deadline
from areal.contracts.messages import Version
from areal.errors import TransferFailed

T = TypeVar("T")


def version_name(version: Version) -> str:
    return f"v{version:08d}"


def failure_path(folder: Path, version: Version) -> Path:
    return folder / f"{version_name(version)}.failed"


@contextmanager
def attempt(folder: Path, uid: str, version: Version) -> Iterator[None]:
    """Publish inside this block: whatever it raises is told to the receivers and becomes TransferFailed."""
    marker = failure_path(folder, version)
    try:
        marker.unlink(missing_ok=True)
        yield
    except BaseException as error:
        _tell(marker, uid, str(error) or type(error).__name__)
        if isinstance(error, TransferFailed) or not isinstance(error, Exception):
            raise
        raise TransferFailed(f"the trainer's sender gave up version {version}: {error}") from error


def _tell(marker: Path, uid: str, reason: str) -> None:
    """Leave a reason beside the versions; without a folder there is nobody who could read it."""
    with suppress(OSError):
        write_json(marker, {"uid": uid, "token": uuid.uuid4().hex, "reason": reason})


class Waiter:
    """The receiver's side. Invariant: each failure of the sender ends at most one wait of this receiver."""

    def __init__(self, folder: Path, uid: str) -> None:
        self.folder = folder
        self.uid = uid
        self._seen: set[str] = set()

    def wait(
        self,
        version: Version,
        deadline: Deadline,
        look: Callable[[], T | None],
        *,
        first_poll_s: float = FIRST_POLL_S,
        missing: Callable[[], str] = str,
    ) -> T:
        """Return what `look` finds; TransferFailed when the sender gives the version up or the time is over.

        `missing`: says for the error what was waited for.
        """

        def look_or_fail() -> T | None:
            if (found := look()) is None:
                self.raise_failure(version)
            return found

        if (found := deadline.poll(look_or_fail, first_poll_s)) is not None:
            return found
        there = sorted(path.name for path in self.folder.glob("v????????")) if self.folder.is_dir() else []
        raise TransferFailed(
            f"the trainer's sender did not finish writing version {version} in {self.folder}"
            f" within {deadline.seconds:g} s (there: {', '.join(there) or 'nothing'}{missing()})"
        )

    def raise_failure(self, version: Version) -> None:
        """Raise TransferFailed when the sender has given the version up, once for each time it did."""
        told = read_json(failure_path(self.folder, version))
        if told.get("uid") == self.uid and told["token"] not in self._seen:
            self._seen.add(told["token"])
            raise TransferFailed(f"the trainer's sender gave up version {version}: {told['reason']}")
