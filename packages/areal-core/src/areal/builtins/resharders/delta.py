"""What changed between two versions: the 16-bit words that differ, in the fewest bytes that are quick to make.

    counts      uint32 for each block of 65536 words: how many of it changed
    offsets     uint16 for each changed word: where in its block
    values      uint16 for each changed word: what it is now
    last byte   of an odd number of bytes

A changed word costs four bytes. At a learning rate of 1e-6 some 0.4 % of bfloat16 words change in a step. Words are
compared as bits, so what is put together again is equal bit by bit, whatever the dtype; in float32 nearly every lower
half changes, and then there is no delta.
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
BLOCK = 65536
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
    num_blocks = -(-num_words // BLOCK)
    odd = new[2 * num_words :]
    if 4 * (num_blocks + len(positions)) + len(odd) >= len(new):
        return None
    edges = np.searchsorted(positions, np.arange(num_blocks + 1, dtype=np.int64) * BLOCK)
    parts = (
        np.diff(edges).astype(np.uint32).view(np.uint8),
        (positions % BLOCK).astype(np.uint16).view(np.uint8),
        new_words[positions].view(np.uint8),
        odd,
    )
    return np.concatenate(parts)


def apply(old: Bytes, delta: Bytes) -> None:
    """Turn `old` into what `delta` was made for, in place. TransferFailed when it was made for another length."""
    num_words = len(old) // 2
    num_blocks = -(-num_words // BLOCK)
    counts = delta[: 4 * num_blocks].view(np.uint32) if len(delta) >= 4 * num_blocks else np.empty(0, np.uint32)
    num_changed = int(counts.sum(dtype=np.int64))
    if len(counts) != num_blocks or len(delta) != 4 * (num_blocks + num_changed) + len(old) % 2:
        raise TransferFailed(f"a delta of {len(delta)} bytes arrived that does not fit {len(old)} bytes of weights")
    offsets = delta[4 * num_blocks :][: 2 * num_changed].view(np.uint16)
    values = delta[4 * num_blocks + 2 * num_changed :][: 2 * num_changed].view(np.uint16)
    positions = np.repeat(np.arange(num_blocks, dtype=np.int64) * BLOCK, counts) + offsets
    if num_changed and positions[-1] >= num_words:
        raise TransferFailed(f"a delta arrived that changes words beyond the {num_words} there are")
    old[: 2 * num_words].view(np.uint16)[positions] = values
    if len(old) % 2:
        old[-1] = delta[-1]


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
