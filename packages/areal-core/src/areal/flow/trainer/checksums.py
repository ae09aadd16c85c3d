"""A checkpoint's seal: size and CRC-32 of each of its files, so that a changed byte is noticed before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

from areal.errors import JournalError

FILE = "checksums.json"
CHUNK_BYTES = 2**24


def seal(folder: Path) -> None:
    """Write the checksums of all files below the folder into it."""
    found = {str(path.relative_to(folder)): _checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def check(folder: Path, share: int = 0, num_shares: int = 1) -> None:
    """Raise JournalError when a file of this share is not what was sealed.

    A folder without seal (of an older AReaL) passes.
    """
    if not (folder / FILE).is_file():
        return
    try:
        sealed: dict[str, list[int]] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        ours = list(sealed.items())[share::num_shares]
        wrong = [name for name, sums in ours if not _is_as_sealed(folder / name, sums)]
    except (OSError, ValueError, AttributeError) as error:
        raise JournalError(f"checkpoint {folder} cannot be read: {error}; go on from an older one") from error
    if wrong:
        raise JournalError(
            f"checkpoint {folder} is damaged: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what was "
            "saved; put a copy back, or go on from an older checkpoint"
        )


def _is_as_sealed(path: Path, sums: list[int]) -> bool:
    return path.is_file() and _checksum(path) == sums


def _checksum(path: Path) -> list[int]:
    """Return [bytes, CRC-32]."""
    size = value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, value = size + len(chunk), crc32(chunk, value)
    return [size, value]
