"""Bringing to the disk what was written: first the data, then whatever points to it."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return once a file, or a folder's list of names, is on the disk; OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
