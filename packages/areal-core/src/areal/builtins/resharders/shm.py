"""Weights through shared memory: the trainer's ranks cast them into a segment, receivers map it and read behind them.

    /dev/shm/areal-<plan>/      one folder per plan, made by the first rank
        owner                   locked by the first rank as long as it lives; the kernel lets go when it dies
        v00000012               a segment whose content is whole
        v00000012.writing       a symbolic link to the segment that is becoming this version
        v00000012.failed        why the trainer gave a version up
        draft-3                 a segment being written or waiting to be used again
        open, verdict, rank-*   how several ranks write one segment together: see ranks.py

The first rank chooses a segment, each rank writes its own boxes in the plan's order and counts them in the segment, and
the first publishes when all have. A receiver yields each tensor as soon as all ranks' counts have passed it, and ends
when the version is published, or raises when it was given up.

A segment is locked shared while any tensor that a receiver yielded is alive, and while another rank is at work on it.
The first rank chooses only segments that nobody else has locked, and makes another when there is none. So a yielded
tensor never changes, nothing is torn, and a rank that comes too late writes into memory that nobody reads. In the
steady state the same two warm segments are used in turn: writing into fresh memory is several times slower than into
memory that was touched before. Everybody keeps them mapped, because mapping costs as much as copying.
"""

from __future__ import annotations

import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from areal.builtins.resharders.locks import LOCK_WAIT_S, holder_died, own
from areal.builtins.resharders.pieces import items_of, sending_ranks
from areal.builtins.resharders.ranks import Lead, Seat
from areal.builtins.resharders.segment import Form, Mapped, Segment
from areal.builtins.resharders.versions import attempt, version_name
from areal.builtins.resharders.wire import Deadline
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan, Receipt
from areal.errors import TransferFailed

S = TypeVar("S", bound=Segment | Mapped | None)
ROOT = Path("/dev/shm")
PREFIX = "areal-"
# In turn: one is being read or staged while the next version is written.
NUM_SEGMENTS = 2
# Of the threads that make checksums: a third of the others' share where cores are short.
CHECKSUM_NICENESS = 5


def plan_folder(uid: str) -> Path:
    return ROOT / f"{PREFIX}{uid}"


def writing_link(folder: Path, version: Version) -> Path:
    """Return the name of what is becoming that version."""
    return folder / f"{version_name(version)}.writing"


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


@dataclass(frozen=True, slots=True)
class Taken(Generic[S]):
    """What waits for `deliver`. Invariant: `held` is let go once, when that is done or was given up."""

    version: Version
    deadline: Deadline
    segment: S
    held: ExitStack

    def receipt(self) -> Receipt:
        """Make the checksums of this rank's pieces, if it has any."""
        if self.segment is None:
            return Receipt(version=self.version, checksums={})
        part = self.segment.part
        with ThreadPoolExecutor(1, initializer=_stand_back) as pool:
            checksums = pool.submit(part.checksums).result()
        return Receipt(
            version=self.version, checksums=checksums, num_bytes=part.num_bytes, seconds=self.deadline.elapsed_s
        )


class Halves(ABC, Generic[S]):
    """A send in two halves (contracts.resharder.Takes). Invariant: what was taken is delivered or given up."""

    def __init__(self) -> None:
        self._deadline = Deadline(0.0)
        self._taken: Taken[S] | None = None

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Cast this rank's pieces into the segment; returns when the version is published, and waits for no receiver.

        Raises TransferFailed, which names the ranks that died, gave up, or did not write in time.
        """
        self.take(version, tensors, deadline_s)
        return self.deliver()

    @abstractmethod
    def take(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        """Cast this rank's pieces into the segment, in `deadline_s` seconds together with `deliver`. TransferFailed.

        What was taken before and not delivered is given up.
        """

    @abstractmethod
    def deliver(self) -> Receipt:
        """Wait for the other ranks until the version is published, and make the checksums. TransferFailed."""

    def interrupt(self) -> None:
        """Wait no longer for the other ranks."""
        self._deadline.end()

    def _pop(self) -> Taken[S]:
        taken, self._taken = self._taken, None
        if taken is None:
            raise TransferFailed("the trainer's sender was asked to deliver what it had not taken; call take before")
        return taken

    def _give_up(self, why: str) -> None:
        """Tell everybody that what was taken will not be delivered, if there is something."""
        if self._taken is not None:
            with suppress(TransferFailed), self._pop().held:
                raise TransferFailed(why)


class ShmSender(Halves[Segment]):
    """The first rank's half. Invariant: nobody writes into memory that a receiver's tensor still shows."""

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        super().__init__()
        self._plan = plan
        self._rank = rank
        self._form = Form(plan)
        self._folder = plan_folder(plan.uid)
        self._lead = Lead(self._folder, sending_ranks(plan.source)[1:])
        self._owner: int | None = None
        self._segments: list[Segment] = []
        self._newest: Segment | None = None
        self._num_names = 0

    def take(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        self._give_up("the trainer took another version before this one was delivered")
        deadline = self._deadline = Deadline(deadline_s)
        self._open()
        with ExitStack() as telling:
            link = writing_link(self._folder, version)
            telling.callback(link.unlink, missing_ok=True)  # last: who misses it finds the reason
            telling.enter_context(attempt(self._folder, self._plan.uid, version))
            telling.enter_context(self._lead.attempt(version))
            segment = self._writable(version)
            link.symlink_to(segment.path.name)
            self._lead.invite({"segment": segment.path.name})
            with _in_time(version, deadline_s):
                segment.part.write(tensors, deadline)
            self._taken = Taken(version, deadline, segment, telling.pop_all())

    def deliver(self) -> Receipt:
        taken = self._pop()
        with taken.held:
            self._lead.wait(taken.deadline)
            taken.segment.publish(self._folder / version_name(taken.version))
            self._newest = taken.segment
        return taken.receipt()

    def close(self) -> None:
        """Remove everything from shared memory; tensors that receivers hold stay valid. Idempotent."""
        self._give_up("the trainer closed its sender before this version was delivered")
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
        for segment in self._segments:
            if segment.path.name == version_name(version):
                # An earlier attempt at this version: receivers must not take it for the new one.
                segment.rename(self._next_name())
        others = [segment for segment in self._segments if segment is not self._newest]
        # At once if possible; else whoever just looks at a name is waited out.
        chosen = self._choose(others, 0.0) or self._choose(others, LOCK_WAIT_S)
        for segment in others:
            if segment is not chosen and segment.is_free():
                self._segments.remove(segment)
                segment.remove()
        if chosen is None:
            chosen = Segment(self._next_name(), self._form, self._rank)
            self._segments.append(chosen)
        return chosen

    def _choose(self, segments: list[Segment], wait_s: float) -> Segment | None:
        return next((segment for segment in segments if segment.choose(self._next_name(), wait_s)), None)

    def _next_name(self) -> Path:
        self._num_names += 1
        return self._folder / f"draft-{self._num_names}"


class ShmHelper(Halves[Mapped | None]):
    """Another rank's half. Invariant: writes its boxes only, and only into the segment that the first rank chose."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._form = Form(plan)
        self._is_needed = bool(items_of(plan, rank))
        self._folder = plan_folder(plan.uid)
        self._seat = Seat(self._folder, rank, sending_ranks(plan.source)[0])
        self._mapped: list[Mapped] = []

    def take(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        self._give_up("it took another version before this one was delivered")
        deadline = self._deadline = Deadline(deadline_s)
        if not self._is_needed:
            self._taken = Taken(version, deadline, None, ExitStack())
            return
        place = self._folder / self._seat.join(version, deadline)["segment"]
        with ExitStack() as held:
            with self._seat.writing(version), _in_time(version, deadline_s):
                segment = self._map(place, version)
                held.callback(segment.release)
                segment.part.write(tensors, deadline)
            held.enter_context(self._seat.writing(version))  # until it is delivered it can still be given up
            self._taken = Taken(version, deadline, segment, held.pop_all())

    def deliver(self) -> Receipt:
        taken = self._pop()
        with taken.held:
            if self._is_needed:
                self._seat.wait(taken.version, taken.deadline)
            return taken.receipt()

    def close(self) -> None:
        """Let go of the segments. Idempotent."""
        self._give_up("it was closed before this version was delivered")
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
            self._mapped.append(Mapped(place, self._form, self._rank))
        except FileNotFoundError:
            pass
        else:
            if self._mapped[-1].hold(place):
                return self._mapped[-1]
        raise TransferFailed(f"trainer rank {self._rank} came too late for version {version}: it was given up")


def _stand_back() -> None:
    """Let those go first who copy the weights: an engine and the trainer's next step wait for them, not for this."""
    thread = threading.get_native_id()  # on Linux niceness is a thread's own
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + CHECKSUM_NICENESS)


@contextmanager
def _in_time(version: Version, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise TransferFailed(f"the trainer's sender did not write version {version} in {deadline_s:g} s") from None
