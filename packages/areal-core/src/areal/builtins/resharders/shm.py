"""Weights through shared memory: the trainer's ranks cast them into a segment, receivers map it.

    /dev/shm/areal-<plan>/      one folder per plan, made by the first rank
        owner                   locked by the first rank as long as it lives; the kernel lets go when it dies
        v00000012               a segment whose content is whole
        v00000012.failed        why the trainer gave a version up
        draft-3                 a segment being written or waiting to be used again
        open, verdict, rank-*   how several ranks write one segment together: see ranks.py

The first rank chooses a segment, each rank writes its own boxes, and the first publishes when all have. A segment is
locked shared while any tensor that a receiver yielded is alive, and while another rank is at work on it. The first rank
chooses only segments that nobody else has locked, and makes another when there is none. So a yielded tensor never
changes, nothing is torn, a rank that comes too late writes into memory that nobody reads, and in the steady state the
same two warm segments are used in turn: writing into fresh memory is several times slower than into memory that was
touched before. Everybody keeps them mapped, because mapping costs as much as copying.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from areal.builtins.resharders.locks import holder_died, is_still, own, try_lock
from areal.builtins.resharders.pieces import items_of, sending_ranks
from areal.builtins.resharders.ranks import Lead, Seat
from areal.builtins.resharders.segment import Boxes, Mapped, Segment, Window, segment_places, segment_tensor
from areal.builtins.resharders.versions import Waiter, attempt, version_name
from areal.builtins.resharders.wire import Deadline, wire_specs
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan, Receipt
from areal.errors import TransferFailed

ROOT = Path("/dev/shm")
PREFIX = "areal-"
# In turn: one is being read or staged while the next version is written.
NUM_SEGMENTS = 2


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
    """Whether the folder's first rank is gone; False while there is none yet."""
    return holder_died(folder / "owner")


def shm_sender(plan: Plan, rank: int) -> ShmSender | ShmHelper:
    """Return what this trainer rank sends with: the first rank that has pieces leads the others."""
    return ShmSender(plan, rank) if rank == sending_ranks(plan.source)[0] else ShmHelper(plan, rank)


class ShmSender:
    """The first rank's half. Invariant: nobody writes into memory that a receiver's tensor still shows."""

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self._plan = plan
        self._boxes = Boxes(wire_specs(plan), items_of(plan, rank))
        self._folder = plan_folder(plan.uid)
        self._lead = Lead(self._folder, sending_ranks(plan.source)[1:])
        self._deadline = Deadline(0.0)
        self._owner: int | None = None
        self._segments: list[Segment] = []
        self._newest: Segment | None = None
        self._num_made = 0

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Cast this rank's pieces into a segment and publish it when all ranks have; waits for no receiver.

        Raises TransferFailed, which names the ranks that died, gave up, or did not write in time.
        """
        deadline = self._deadline = Deadline(deadline_s)
        self._open()
        with attempt(self._folder, self._plan.uid, version), self._lead.attempt(version):
            segment = self._writable(version)
            self._lead.invite({"segment": segment.path.name})
            with _in_time(version, deadline_s):
                self._boxes.write(segment.memory, tensors, deadline)
            self._lead.wait(deadline)
            segment.rename(self._folder / version_name(version))
            self._newest = segment
        # After publishing, so that receivers read while the checksums are made.
        return _receipt(version, self._boxes, segment.memory, deadline)

    def interrupt(self) -> None:
        """Wait no longer for the other ranks."""
        self._deadline.end()

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
            self._owner = own(self._folder / "owner")
        except OSError as error:
            raise TransferFailed(
                f"the trainer cannot make {self._folder}: {error.strerror}; set the resharder's shared_memory to never"
            ) from error
        if self._owner is None:
            raise TransferFailed(f"another sender of this plan is alive and holds {self._folder}; close it first")

    def _writable(self, version: Version) -> Segment:
        """Return a segment that nobody reads; those beyond the two in turn are given back."""
        for segment in [s for s in self._segments if s.path.name == version_name(version)]:
            self._retire(segment)  # an earlier attempt at this version: receivers must not take it for the new one
        free = [s for s in self._segments if s is not self._newest and s.is_free()]
        for segment in free[1:]:
            self._drop(segment)
        if not free:
            self._num_made += 1
            free = [Segment(self._folder / f"draft-{self._num_made}", self._boxes.size)]
            self._segments += free
        # A reader that opened the old name in between finds that it is gone, and looks again.
        self._retire(free[0])
        return free[0]

    def _retire(self, segment: Segment) -> None:
        self._num_made += 1
        segment.rename(self._folder / f"draft-{self._num_made}")

    def _drop(self, segment: Segment) -> None:
        self._segments.remove(segment)
        segment.remove()


class ShmHelper:
    """Another rank's half. Invariant: writes its boxes only, and only into the segment that the first rank chose."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank = rank
        self._items = items_of(plan, rank)
        self._boxes = Boxes(wire_specs(plan), self._items)
        self._folder = plan_folder(plan.uid)
        self._seat = Seat(self._folder, rank, sending_ranks(plan.source)[0])
        self._deadline = Deadline(0.0)
        self._mapped: list[Mapped] = []

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Cast this rank's pieces into the segment; returns when the version is published. TransferFailed."""
        deadline = self._deadline = Deadline(deadline_s)
        if not self._items:
            return Receipt(version=version, checksums={})
        place = self._folder / self._seat.join(version, deadline)["segment"]
        with ExitStack() as held:
            with self._seat.writing(version), _in_time(version, deadline_s):
                segment = self._map(place, version)
                held.callback(segment.release)
                self._boxes.write(segment.memory, tensors, deadline)
            self._seat.wait(version, deadline)
            return _receipt(version, self._boxes, segment.memory, deadline)

    def interrupt(self) -> None:
        """Wait no longer for the first rank."""
        self._deadline.end()

    def close(self) -> None:
        """Let go of the segments. Idempotent."""
        for segment in self._mapped:
            segment.close()
        self._mapped = []
        self._seat.close()

    def _map(self, place: Path, version: Version) -> Mapped:
        """Return the segment, locked; mapped ones that the first rank has given back are let go."""
        for segment in [segment for segment in self._mapped if segment.is_gone()]:
            self._mapped.remove(segment)
            segment.close()
        for segment in self._mapped:
            if segment.hold(place):
                return segment
        try:
            self._mapped.append(Mapped(place, self._boxes.size))
        except FileNotFoundError:
            pass
        else:
            if self._mapped[-1].hold(place):
                return self._mapped[-1]
        raise TransferFailed(f"trainer rank {self._rank} came too late for version {version}: it was given up")


@contextmanager
def _in_time(version: Version, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise TransferFailed(f"the trainer's sender did not write version {version} in {deadline_s:g} s") from None


def _receipt(version: Version, boxes: Boxes, memory: mmap.mmap, deadline: Deadline) -> Receipt:
    return Receipt(
        version=version,
        checksums=boxes.checksums(memory),
        num_bytes=boxes.num_bytes,
        seconds=deadline.elapsed_s,
    )


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
        self._windows: list[Window] = []

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
        """Let go of the segments, and remove what a dead sender left. Idempotent."""
        while self._windows:
            self._windows.pop().close()
        sweep()

    def _read(self, version: Version, deadline: Deadline) -> Iterator[tuple[str, torch.Tensor]]:
        memory = self._waiter.wait(version, deadline, lambda: self._map(version))
        for spec, place in zip(self._specs, self._places, strict=True):
            yield spec.name, segment_tensor(memory, spec, place)

    def _map(self, version: Version) -> memoryview | None:
        """Show the version when it is there, with its segment locked until the last tensor is gone."""
        path = self._folder / version_name(version)
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:
            if owner_died(self._folder):
                raise TransferFailed(
                    f"the trainer's sender died before version {version} was in {self._folder};"
                    " restart the trainer and make a new plan"
                ) from None
            return None
        # Between opening and locking the sender may have taken the segment for a later version.
        if not (try_lock(lock, fcntl.LOCK_SH) and is_still(lock, path)):
            os.close(lock)
            return None
        return self._window(path).show(lock)

    def _window(self, path: Path) -> Window:
        """Return a fresh view of a locked segment, one that was mapped before if possible: that saves page faults."""
        for window in [window for window in self._windows if window.is_gone() or window.shows(path)]:
            if window.shows(path) and window.is_fresh():
                return window
            self._windows.remove(window)
            window.close()
        window = Window(path, self._size)
        # What stays mapped takes room after its sender is gone; the segments of a next plan must find theirs.
        if room_for(NUM_SEGMENTS * self._size):
            self._windows.append(window)
        else:
            window.close()
        return window
