"""Locks on files (flock(2)): the kernel lets go when the holder dies, whatever killed it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from areal.builtins.resharders.wire import Deadline

# A peer holds a lock for some microseconds while it looks whether the holder lives; wait that out.
LOCK_WAIT_S = 0.1


def try_lock(handle: int, mode: int) -> bool:
    """Lock an open file if nobody is in the way; False as well where the file system has no locks."""
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def try_own(handle: int, wait_s: float = LOCK_WAIT_S) -> bool:
    """Lock an open file for this process alone."""
    return Deadline(wait_s).poll(lambda: try_lock(handle, fcntl.LOCK_EX) or None) or False


def holder_died(path: Path) -> bool:
    """Whether a process owned this file and is gone; False while there was none yet."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # The file is empty until its owner holds the lock, so one that is just starting is not taken for dead.
        return os.fstat(handle).st_size > 0 and try_lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def own(path: Path) -> int | None:
    """Own a file as long as the returned handle is open; None when another process does. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if not try_own(handle):
        os.close(handle)
        return None
    os.write(handle, str(os.getpid()).encode())
    return handle


def is_still(handle: int, path: Path) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
