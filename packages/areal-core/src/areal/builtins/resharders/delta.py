"""What changed between two versions: the 16-bit words that differ, in few bytes that are quick to make.

    uint32 [2]      how many words changed, and the bytes of one gap (1 or 2)
    uint16 [*]      what they are now
    gaps            how far each is from the one before; the highest number says: so far, and further
    last byte       of an odd number of bytes

At a learning rate of 1e-6 some 0.2 to 1 % of bfloat16 words change in a step, and one costs three to four bytes. Words
are compared as bits, so what is put together again is equal bit by bit, whatever the dtype; in float32, where nearly
every lower half changes, three quarters of the bytes are left at best.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal.errors import TransferFailed

Bytes: TypeAlias = NDArray[np.uint8]
Mode = Literal["auto", "never", "always"]
HEADER_BYTES = 8
GAPS = (np.dtype(np.uint8), np.dtype(np.uint16))
# Measurements of this many buckets decide; a few of them may have been disturbed.
REMEMBERED = 32
# Buckets of a transfer that are tried when it is not known whether a delta pays.
TRIED = 2
# Transfers after which an answer of "it does not pay" is asked again.
ASK_AGAIN = 16


def encode(old: Bytes, new: Bytes) -> Bytes | None:
    """Return what makes `new` of `old` (uint8 [n] both); None when that is not shorter than `new`."""
    num_words = len(new) // 2
    old_words, new_words = (array[: 2 * num_words].view(np.uint16) for array in (old, new))
    positions = np.flatnonzero(old_words != new_words)
    if HEADER_BYTES + 3 * len(positions) >= len(new):
        return None
    gaps = np.diff(positions, prepend=0)
    packed = min((_pack(gaps, dtype) for dtype in GAPS), key=lambda packed: packed.nbytes)
    header = np.array([len(positions), packed.itemsize], dtype=np.uint32)
    parts = (header.view(np.uint8), new_words[positions].view(np.uint8), packed.view(np.uint8), new[2 * num_words :])
    return np.concatenate(parts) if sum(map(len, parts)) < len(new) else None


def apply(old: Bytes, delta: Bytes) -> None:
    """Turn `old` into what `delta` was made for, in place. TransferFailed when it was made for other bytes."""
    num_words, odd = divmod(len(old), 2)
    num_changed, gap_bytes = delta[:HEADER_BYTES].view(np.uint32).tolist() if len(delta) >= HEADER_BYTES else (0, 0)
    gaps_at, end = HEADER_BYTES + 2 * num_changed, len(delta) - odd
    if gap_bytes not in (1, 2) or end < gaps_at or (end - gaps_at) % gap_bytes:
        raise TransferFailed(f"a delta of {len(delta)} bytes arrived that does not fit {len(old)} bytes of weights")
    gaps = delta[gaps_at:end].view(GAPS[gap_bytes - 1])
    is_last = gaps != np.iinfo(gaps.dtype).max
    positions = np.cumsum(gaps, dtype=np.int64)[is_last]
    if len(positions) != num_changed or (num_changed and positions[-1] >= num_words):
        raise TransferFailed(f"a delta arrived that changes {len(positions)} words, not {num_changed} of {num_words}")
    old[: 2 * num_words].view(np.uint16)[positions] = delta[HEADER_BYTES:gaps_at].view(np.uint16)
    if odd:
        old[-1] = delta[-1]


def _pack(gaps: NDArray[np.int64], dtype: np.dtype[np.uint8] | np.dtype[np.uint16]) -> NDArray[np.uint8 | np.uint16]:
    """Return each gap as so many of the highest number as it contains, and the rest."""
    highest = np.iinfo(dtype).max
    full, rest = np.divmod(gaps, highest)
    ends = np.cumsum(full + 1)
    packed = np.full(int(ends[-1]) if len(ends) else 0, highest, dtype=dtype)
    packed[ends - 1] = rest
    return packed


class Choice:
    """Whether deltas are worth their time, by this rank's own clock: making one and waiting for the wire, against
    waiting for the wire alone.

    Invariant: decides how many bytes travel, never which weights arrive.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._whole: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds per byte of weights."""
        self._delta: deque[float] = deque(maxlen=REMEMBERED)
        self._num_refused = 0

    def wants(self) -> bool:
        """Whether the next transfer should be one with deltas."""
        if self._mode != "auto" or self.pays:
            return self._mode != "never"
        self._num_refused += 1
        if self._num_refused % ASK_AGAIN == 0:
            self._delta.clear()
        return bool(self._whole) and not self._delta

    def tries(self) -> bool:
        """Whether the next bucket of such a transfer should be one."""
        return self._mode == "always" or len(self._delta) < TRIED or self.pays

    @property
    def pays(self) -> bool:
        if not self._whole or not self._delta:
            return False
        return statistics.median(self._delta) < statistics.median(self._whole)

    def took(self, num_bytes: int, seconds: float, *, tried: bool) -> None:
        """Note how long a bucket of so many bytes of weights kept this rank busy or waiting."""
        (self._delta if tried else self._whole).append(seconds / num_bytes)
