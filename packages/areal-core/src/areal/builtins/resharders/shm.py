"""Weights through shared memory: the sender casts them into a segment, receivers map it.

    /dev/shm/areal-<plan>/      one folder per plan, made by the sender
        owner                   locked by the sender as long as it lives; the kernel lets go when it dies
        v00000012               a segment whose content is whole
        v00000012.failed        why the sender gave a version up
        draft-3                 a segment being written or waiting to be used again

A segment is locked shared while any tensor that a receiver yielded is alive, because the mapping holds the lock.
The sender writes only into segments that nobody else has locked, and makes another when there is none. So a yielded
tensor never changes, nothing is torn, and in the steady state the same two warm segments are used in turn:
writing into fresh memory is several times slower than into memory that was touched before.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from areal.builtins.resharders.versions import Waiter, attempt, version_name
from areal.builtins.resharders.wire import Deadline, checked, num_bytes, torch_dtype, wire_specs
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan, Receipt, TensorSpec, checksum
from areal.errors import TransferFailed

ROOT = Path("/dev/shm")
PREFIX = "areal-"
# A cache line, so that every tensor starts aligned for any dtype.
ALIGNMENT = 64
# A receiver holds a lock for some microseconds while it looks whether the sender lives; wait that out.
LOCK_WAIT_S = 0.1


def plan_folder(uid: str) -> Path:
    return ROOT / f"{PREFIX}{uid}"


def room_for(num_bytes_needed: int) -> bool:
    """Whether this machine has shared memory with room for so many bytes."""
    return ROOT.is_dir() and shutil.disk_usage(ROOT).free >= num_bytes_needed


def sweep() -> None:
    """Remove the folders of senders that are dead."""
    for folder in ROOT.glob(f"{PREFIX}*"):
        if owner_died(folder):
            shutil.rmtree(folder, ignore_errors=True)


def owner_died(folder: Path) -> bool:
    """Whether the folder's sender is gone; False while there is none yet."""
    try:
        handle = os.open(folder / "owner", os.O_RDONLY)
    except OSError:
        return False
    try:
        # The file is empty until its sender holds the lock, so a sender just starting is not taken for a dead one.
        return os.fstat(handle).st_size > 0 and _try_lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _try_lock(handle: int, mode: int) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def segment_places(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return each tensor's offset in a segment, and the segment's size in bytes."""
    places: list[int] = []
    end = 0
    for spec in specs:
        places.append(end)
        end += -(-num_bytes(spec) // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def segment_tensor(memory: mmap.mmap, spec: TensorSpec, place: int) -> torch.Tensor:
    """Return a tensor over mapped memory; the mapping lives as long as the tensor."""
    dtype = torch_dtype(spec.dtype)
    if not (count := prod(spec.shape)):
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(spec.shape)


class _Segment:
    """Invariant: its content changes only between `try_lock` and `unlock`."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Takes the pages now: a full /dev/shm is then an error here and not a signal that kills the process.
            os.posix_fallocate(self._handle, 0, size)
        except OSError as error:
            self.remove()
            free = shutil.disk_usage(path.parent).free
            raise TransferFailed(
                f"the weights need {size} bytes of shared memory, but {ROOT} has {free} left ({error.strerror});"
                " enlarge it or set the resharder's shared_memory to never"
            ) from error
        self.memory = mmap.mmap(self._handle, size)

    def try_lock(self) -> bool:
        return Deadline(LOCK_WAIT_S).poll(lambda: _try_lock(self._handle, fcntl.LOCK_EX) or None) or False

    def unlock(self) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def rename(self, path: Path) -> None:
        self.path = self.path.rename(path)

    def remove(self) -> None:
        """Take the name away; the memory goes with the last mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self._handle)


class ShmSender:
    """Invariant: never writes into memory that a receiver's tensor still shows."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs = wire_specs(plan)
        self._places, self._size = segment_places(self._specs)
        self._folder = plan_folder(plan.uid)
        self._owner: int | None = None
        self._segments: list[_Segment] = []
        self._newest: _Segment | None = None
        self._num_made = 0

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Cast all tensors into a segment and publish it; returns without waiting for receivers. TransferFailed."""
        deadline = Deadline(deadline_s)
        self._open()
        with attempt(self._folder, self._plan.uid, version):
            segment = self._writable(version)
            for place, (spec, tensor) in zip(self._places, checked(self._specs, tensors), strict=True):
                segment_tensor(segment.memory, spec, place).copy_(tensor)
                if deadline.left_s == 0:
                    raise TransferFailed(f"the trainer's sender did not write version {version} in {deadline_s:g} s")
            segment.unlock()
            segment.rename(self._folder / version_name(version))
            self._newest = segment
        # After publishing, so that receivers read while the checksums are made.
        shown = zip(self._specs, self._places, strict=True)
        checksums = {spec.name: checksum(segment_tensor(segment.memory, spec, place)) for spec, place in shown}
        size = sum(map(num_bytes, self._specs))
        return Receipt(version=version, checksums=checksums, num_bytes=size, seconds=deadline.elapsed_s)

    def close(self) -> None:
        """Remove everything from shared memory; tensors that receivers hold stay valid. Idempotent."""
        if self._owner is None:
            return
        for segment in self._segments:
            segment.remove()
        self._segments, self._newest = [], None
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._owner)
        self._owner = None

    def _open(self) -> None:
        """Become the owner of the plan's folder, once."""
        if self._owner is not None:
            return
        sweep()
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            owner = os.open(self._folder / "owner", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise TransferFailed(
                f"the trainer cannot make {self._folder}: {error.strerror}; set the resharder's shared_memory to never"
            ) from error
        if not Deadline(LOCK_WAIT_S).poll(lambda: _try_lock(owner, fcntl.LOCK_EX) or None):
            os.close(owner)
            raise TransferFailed(f"another sender of this plan is alive and holds {self._folder}; close it first")
        os.write(owner, str(os.getpid()).encode())
        self._owner = owner

    def _writable(self, version: Version) -> _Segment:
        """Return a locked segment that nobody reads; segments beyond the two in turn are given back."""
        for segment in [s for s in self._segments if s.path.name == version_name(version)]:
            self._retire(segment)  # an earlier attempt at this version: receivers must not take it for the new one
        free = [s for s in self._segments if s is not self._newest and s.try_lock()]
        for segment in free[1:]:
            self._drop(segment)
        if not free:
            self._num_made += 1
            free = [_Segment(self._folder / f"draft-{self._num_made}", self._size)]
            self._segments += free
            free[0].try_lock()
        self._retire(free[0])
        return free[0]

    def _retire(self, segment: _Segment) -> None:
        self._num_made += 1
        segment.rename(self._folder / f"draft-{self._num_made}")

    def _drop(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        segment.remove()


class ShmReceiver:
    """Invariant: yielded tensors show one version for as long as they live, and writing to them changes nobody."""

    def __init__(self, plan: Plan, member: int) -> None:
        self._plan = plan
        self._member = member
        self._deadline = Deadline(0.0)
        self._specs = wire_specs(plan)
        self._places, self._size = segment_places(self._specs)
        self._folder = plan_folder(plan.uid)
        self._waiter = Waiter(self._folder, plan.uid)

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors on the CPU without copying them; a segment is free again when its tensors are.

        Raises TransferFailed when the sender gives up, dies, or does not publish in `deadline_s` seconds.
        """
        self._deadline = Deadline(deadline_s)
        return self._read(version, self._deadline)

    def interrupt(self) -> None:
        """Wait no longer."""
        self._deadline.end()

    def close(self) -> None:
        """Remove what a dead sender left; nothing is held between versions."""
        sweep()

    def _read(self, version: Version, deadline: Deadline) -> Iterator[tuple[str, torch.Tensor]]:
        memory = self._waiter.wait(version, deadline, lambda: self._map(version))
        for spec, place in zip(self._specs, self._places, strict=True):
            yield spec.name, segment_tensor(memory, spec, place)

    def _map(self, version: Version) -> mmap.mmap | None:
        """Map the version when it is there; the mapping keeps the segment locked until its last tensor is gone."""
        path = self._folder / version_name(version)
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            if owner_died(self._folder):
                raise TransferFailed(
                    f"the trainer's sender died before version {version} was in {self._folder};"
                    " restart the trainer and make a new plan"
                ) from None
            return None
        try:
            # Between opening and locking the sender may have taken the segment for a later version.
            if _try_lock(handle, fcntl.LOCK_SH) and _same_file(handle, path):
                return mmap.mmap(handle, self._size, access=mmap.ACCESS_COPY)
            return None
        finally:
            os.close(handle)  # the mapping has a handle of its own, and with it the lock


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
