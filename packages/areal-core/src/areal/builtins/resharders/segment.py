"""Segments of shared memory: a version's tensors side by side, written by one rank or by many while others read."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import weakref
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import torch

from areal.builtins.resharders.locks import LOCK_WAIT_S, is_still, try_lock, try_own
from areal.builtins.resharders.pieces import items_of, sending_ranks
from areal.builtins.resharders.wire import Deadline, checked, num_bytes, torch_dtype, wire_specs
from areal.contracts.transfer import Plan, checksum, pieces_of
from areal.errors import TransferFailed

# Whole pages: a reader that writes into a tensor makes private copies of its pages, in which it would not see what
# ranks write into another tensor there later.
ALIGNMENT = mmap.ALLOCATIONGRANULARITY
# Each rank's count in a cache line of its own, as numbers of 8 bytes.
COUNT_STRIDE = 8
# What the kernel tells of each page of this process (proc_pid_pagemap(5)).
PAGES = Path("/proc/self/pagemap")
PRESENT, SWAPPED, OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


class Form:
    """Where everything stands in a plan's segments: tensors, then counts. Invariant: the plan alone decides."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.specs = wire_specs(plan)
        self.ranks = sending_ranks(plan.source)
        self.next_tensors = [
            [*(piece.tensor for piece in pieces_of(plan.source, rank)), len(self.specs)] for rank in self.ranks
        ]
        """For each of `ranks` and n: the tensor of its next piece when n are written; it is done with those before."""
        self.places: list[int] = []
        end = 0
        for spec in self.specs:
            self.places.append(end)
            end += _whole_pages(num_bytes(spec))
        self._num_counts = len(self.ranks) + 1
        self.counts_at = max(end, ALIGNMENT)
        """Bytes before the counts."""
        self.size = self.counts_at + _whole_pages(8 * COUNT_STRIDE * self._num_counts)

    def tensor(self, memory: mmap.mmap | memoryview, index: int) -> torch.Tensor:
        """Return a tensor of the plan over mapped memory; the mapping lives as long as the tensor."""
        spec = self.specs[index]
        dtype = torch_dtype(spec.dtype)
        if not (count := prod(spec.shape)):
            return torch.empty(spec.shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=self.places[index]).view(spec.shape)

    def counts(self, memory: mmap.mmap, place: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the counts at `place` in mapped memory: of pieces written by each of `ranks`, then 1 if published."""
        every = np.frombuffer(memory, dtype=np.uint64, count=COUNT_STRIDE * self._num_counts, offset=place)
        return every[::COUNT_STRIDE]


def _whole_pages(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Part:
    """One rank's boxes in one segment. Invariant: touches nothing outside them, and counts what is whole only."""

    def __init__(self, form: Form, rank: int, memory: mmap.mmap) -> None:
        self._items = items_of(form.plan, rank)
        self._specs = [item.spec for item in self._items]
        # Made once for a segment that serves many versions.
        self._boxes = [form.tensor(memory, item.piece.tensor)[item.piece.box] for item in self._items]
        self._counts, self._place = form.counts(memory, form.counts_at), form.ranks.index(rank)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], deadline: Deadline) -> None:
        """Cast all tensors into place. TransferFailed when they are not the plan's, TimeoutError."""
        last = len(self._boxes) - 1
        for number, (_, tensor) in enumerate(checked(self._specs, tensors)):
            self._boxes[number].copy_(tensor)
            if deadline.left_s == 0:
                raise TimeoutError
            if number < last:
                self._tell(number + 1)
        self._tell(last + 1)  # after the stream has ended as the plan says

    def checksums(self) -> dict[str, int]:
        """Return the CRC-32 of what stands there now."""
        return {item.name: checksum(box) for item, box in zip(self._items, self._boxes, strict=True)}

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self._items)

    def _tell(self, count: int) -> None:
        # One aligned store of 8 bytes, after `copy_` has returned: the processors on which receivers look at counts
        # (shm_receiver.ORDERS_STORES) show it to nobody before the bytes that were stored earlier.
        self._counts[self._place] = count


class Progress:
    """What the ranks have written, as a receiver sees it. Invariant: a tensor counted as whole never changes again."""

    def __init__(self, form: Form, counts: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        self._ranks = form.ranks
        self._counts = counts
        self._next = form.next_tensors

    def num_whole(self) -> int:
        """Return how many of the plan's first tensors are whole."""
        return min(following[count] for following, count in zip(self._next, self._counts.tolist(), strict=False))

    def is_published(self) -> bool:
        return bool(self._counts[-1])

    def missing(self) -> str:
        """Return what ranks have still to write, in words."""
        short = [
            f"trainer rank {rank} wrote {count} of {len(following) - 1} pieces"
            for rank, following, count in zip(self._ranks, self._next, self._counts.tolist(), strict=False)
            if count < len(following) - 1
        ]
        return ", ".join(short)


class Segment:
    """The first rank's. Invariant: chosen for a version only while no other process reads or writes it."""

    def __init__(self, path: Path, form: Form, rank: int) -> None:
        self.path = path
        size = form.size
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
        memory = mmap.mmap(self._handle, size)
        self._counts = form.counts(memory, form.counts_at)
        self.part = Part(form, rank, memory)

    def choose(self, path: Path, wait_s: float) -> bool:
        """Take it for another version, under another name, if nobody has it locked within that time."""
        if not try_own(self._handle, wait_s):
            return False
        try:
            # While it is locked: who opened it under its old name finds that it is gone, and looks again.
            self.rename(path)
            self._counts[:] = 0
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        return True

    def is_free(self) -> bool:
        """Whether nobody has it locked."""
        if not try_lock(self._handle, fcntl.LOCK_EX):
            return False
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return True

    def rename(self, path: Path) -> None:
        self.path = self.path.rename(path)

    def publish(self, path: Path) -> None:
        """Give it the name of a whole version, and mark it: readers may look after the name is gone again."""
        self.rename(path)
        self._counts[-1] = 1

    def remove(self) -> None:
        """Take the name away; the memory goes with the last mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self._handle)


class Mapped:
    """Another rank's view of a segment, kept because mapping afresh costs a page fault for every page.

    Invariant: locked shared from `hold` to `release`, so that the first rank cannot choose the segment meanwhile.
    """

    def __init__(self, path: Path, form: Form, rank: int) -> None:
        self._handle = os.open(path, os.O_RDWR)
        self.part = Part(form, rank, mmap.mmap(self._handle, form.size))

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


class Shown:
    """A locked segment as a receiver sees it. Invariant: locked as long as this or a tensor of it lives."""

    def __init__(self, form: Form, memory: memoryview, progress: Progress, lock: int) -> None:
        self._form = form
        self._memory = memory
        self._lock = lock
        self.progress = progress
        weakref.finalize(memory, os.close, lock)

    def tensor(self, index: int) -> torch.Tensor:
        """Return a tensor of the plan, [*its shape]."""
        return self._form.tensor(self._memory, index)

    def is_at(self, path: Path) -> bool:
        """Whether it is the segment of that name."""
        return is_still(self._lock, path)


class Window:
    """A receiver's private view of a segment: what is written into it stays in this process.

    Invariant: shown again only when nobody looks at it any more, and nobody ever wrote into it.
    """

    def __init__(self, lock: int, form: Form) -> None:
        """`lock`: the segment's open file, opened here once more because that one carries the lock."""
        self._form = form
        self._handle = os.open(f"/proc/self/fd/{lock}", os.O_RDONLY)
        self._memory = mmap.mmap(self._handle, form.counts_at, access=mmap.ACCESS_COPY)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        counts = mmap.mmap(self._handle, form.size - form.counts_at, access=mmap.ACCESS_READ, offset=form.counts_at)
        self._progress = Progress(form, form.counts(counts, 0))
        self._shown: weakref.ref[memoryview] | None = None

    def show(self, lock: int) -> Shown:
        """Return what it shows; the open file `lock` is closed when that and its last tensor are gone."""
        view = memoryview(self._memory)
        self._shown = weakref.ref(view)
        return Shown(self._form, view, self._progress, lock)

    def shows(self, lock: int) -> bool:
        """Whether it is of that segment."""
        return os.path.samestat(os.fstat(self._handle), os.fstat(lock))

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
