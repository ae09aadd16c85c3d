"""Segments of shared memory: a version's tensors side by side, written by one rank or by many."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from areal.builtins.resharders.locks import LOCK_WAIT_S, is_still, try_lock, try_own
from areal.builtins.resharders.pieces import Item
from areal.builtins.resharders.wire import Deadline, checked, num_bytes, torch_dtype
from areal.contracts.transfer import TensorSpec, checksum
from areal.errors import TransferFailed

# A cache line, so that every tensor starts aligned for any dtype.
ALIGNMENT = 64
# What the kernel tells of each page of this process (proc_pid_pagemap(5)).
PAGES = Path("/proc/self/pagemap")
PRESENT, SWAPPED, OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


def segment_places(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return each tensor's offset in a segment, and the segment's size in bytes."""
    places: list[int] = []
    end = 0
    for spec in specs:
        places.append(end)
        end += -(-num_bytes(spec) // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def segment_tensor(memory: mmap.mmap | memoryview, spec: TensorSpec, place: int) -> torch.Tensor:
    """Return a tensor over mapped memory; the mapping lives as long as the tensor."""
    dtype = torch_dtype(spec.dtype)
    if not (count := prod(spec.shape)):
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(spec.shape)


class Segment:
    """The first rank's. Invariant: chosen for a version only while no other process reads or writes it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Takes the pages now: a full /dev/shm is then an error here and not a signal that kills the process.
            os.posix_fallocate(self._handle, 0, size)
        except OSError as error:
            self.remove()
            root = path.parent.parent
            raise TransferFailed(
                f"the weights need {size} bytes of shared memory, but {root} has {shutil.disk_usage(root).free} left"
                f" ({error.strerror}); enlarge it or set the resharder's shared_memory to never"
            ) from error
        self.memory = mmap.mmap(self._handle, size)

    def is_free(self) -> bool:
        """Whether nobody has it locked; a reader that just looks at its name is waited out."""
        if not try_own(self._handle):
            return False
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return True

    def rename(self, path: Path) -> None:
        self.path = self.path.rename(path)

    def remove(self) -> None:
        """Take the name away; the memory goes with the last mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self._handle)


class Mapped:
    """Another rank's view of a segment, kept because mapping afresh costs a page fault for every page.

    Invariant: locked shared from `hold` to `release`, so that the first rank cannot choose the segment meanwhile.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._handle = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(self._handle, size)

    def hold(self, path: Path) -> bool:
        """Lock it; False when it is not, or no longer, the segment of that name."""
        locked = Deadline(LOCK_WAIT_S).poll(lambda: try_lock(self._handle, fcntl.LOCK_SH) or None)
        if locked and is_still(self._handle, path):
            return True
        self.release()
        return False

    def release(self) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def is_gone(self) -> bool:
        """Whether the first rank has given the segment back."""
        return os.fstat(self._handle).st_nlink == 0

    def close(self) -> None:
        os.close(self._handle)


class Window:
    """A receiver's private view of a segment: what is written into it stays in this process.

    Invariant: shown again only when nobody looks at it any more, and nobody ever wrote into it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        self._memory = mmap.mmap(self._handle, size, access=mmap.ACCESS_COPY)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._shown: weakref.ref[memoryview] | None = None

    def show(self, lock: int) -> memoryview:
        """Return the memory; the open file `lock` is closed when the last tensor over it is gone."""
        view = memoryview(self._memory)
        weakref.finalize(view, os.close, lock)
        self._shown = weakref.ref(view)
        return view

    def shows(self, path: Path) -> bool:
        """Whether it is of the segment of that name."""
        return is_still(self._handle, path)

    def is_fresh(self) -> bool:
        """Whether it still shows the segment as it is, to nobody else; False as well where the kernel does not tell."""
        if self._shown is not None and self._shown() is not None:
            return False
        page, size = mmap.PAGESIZE, len(self._memory)
        try:
            with PAGES.open("rb", buffering=0) as pages:
                told = os.pread(pages.fileno(), 8 * -(-size // page), 8 * (self._address // page))
        except OSError:
            return False
        flags = np.frombuffer(told, dtype=np.uint64)
        is_own = (flags & PRESENT != 0) & (flags & OF_A_FILE == 0) | (flags & SWAPPED != 0)
        return len(told) == 8 * -(-size // page) and not is_own.any()

    def is_gone(self) -> bool:
        """Whether the sender has given the segment back."""
        return os.fstat(self._handle).st_nlink == 0

    def close(self) -> None:
        """Let go; the memory goes with the last tensor."""
        os.close(self._handle)


class Boxes:
    """One rank's items in a segment. Invariant: touches nothing outside their boxes."""

    def __init__(self, wholes: Sequence[TensorSpec], items: Sequence[Item]) -> None:
        self._wholes = wholes
        self._items = items
        self._places, self.size = segment_places(wholes)

    def write(self, memory: mmap.mmap, tensors: Iterable[tuple[str, torch.Tensor]], deadline: Deadline) -> None:
        """Cast all tensors into place. TransferFailed when they are not the plan's, TimeoutError."""
        specs = [item.spec for item in self._items]
        for number, (_, tensor) in enumerate(checked(specs, tensors)):
            self._box(memory, self._items[number]).copy_(tensor)
            if deadline.left_s == 0:
                raise TimeoutError

    def checksums(self, memory: mmap.mmap) -> dict[str, int]:
        """Return the CRC-32 of what stands there now."""
        return {item.name: checksum(self._box(memory, item)) for item in self._items}

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self._items)

    def _box(self, memory: mmap.mmap, item: Item) -> torch.Tensor:
        index = item.piece.tensor
        return segment_tensor(memory, self._wholes[index], self._places[index])[item.piece.box]
