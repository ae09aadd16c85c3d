"""The receiving half of weights through shared memory: reads behind the ranks that write (shm.py)."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import torch

from areal.builtins.resharders.locks import is_still, try_lock
from areal.builtins.resharders.segment import Form, Shown, Window
from areal.builtins.resharders.shm import NUM_SEGMENTS, owner_died, plan_folder, room_for, sweep, writing_link
from areal.builtins.resharders.versions import Waiter, version_name
from areal.builtins.resharders.wire import Deadline
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan
from areal.errors import TransferFailed

T = TypeVar("T")
# Whether another processor sees stores, and makes loads, in the order of the program. Others need a barrier between a
# piece and its count, which Python does not have; there receivers wait until the version is published.
ORDERS_STORES = platform.machine() in ("x86_64", "AMD64")
# A tensor of some megabytes is written in about a millisecond; a look at the counts costs some microseconds. Whether
# the sender lives costs ten times as much, so that is asked when a wait lasts longer than a large tensor takes.
READ_POLL_S = 0.0002
QUICK_S = 0.02


class ShmReceiver:
    """Invariant: yielded tensors show one version for as long as they live, and writing to them changes nobody."""

    lasting: Literal[True] = True

    def __init__(self, plan: Plan, member: int) -> None:
        self._deadline = Deadline(0.0)
        self._form = Form(plan)
        self._folder = plan_folder(plan.uid)
        self._waiter = Waiter(self._folder, plan.uid)
        self._windows: list[Window] = []

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor on the CPU when it is written, without copying it; a segment is free when its tensors are.

        Ends when the version is published. Raises TransferFailed when the sender gives up, dies, or does not publish in
        `deadline_s` seconds; what was yielded before is no version then, and still never changes.
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
        shown = self._waiter.wait(version, deadline, lambda: self._map(version), first_poll_s=READ_POLL_S)
        whole = 0
        for index, spec in enumerate(self._form.specs):
            if index >= whole:
                whole = self._num_whole(shown, index, version, deadline)
            yield spec.name, shown.tensor(index)
        self._watch(shown, version, deadline, lambda: self._is_published(shown, version) or None)

    def _num_whole(self, shown: Shown, index: int, version: Version, deadline: Deadline) -> int:
        """Wait for the tensor of that index; return how many of the first tensors are whole."""

        def look() -> int | None:
            return whole if (whole := shown.progress.num_whole()) > index else None

        return self._watch(shown, version, deadline, look)

    def _watch(self, shown: Shown, version: Version, deadline: Deadline, look: Callable[[], T | None]) -> T:
        """Wait for what `look` finds while the version is being written; TransferFailed."""
        if (found := Deadline(min(QUICK_S, deadline.left_s)).poll(look, READ_POLL_S)) is not None:
            return found
        places = writing_link(self._folder, version), self._place(version)

        def look_or_fail() -> T | None:
            died = owner_died(self._folder)
            # In this order, since a segment goes from the first name to the second.
            is_gone = not any(shown.is_at(place) for place in places)
            found = look()  # looked at last: what was done before the end counts
            if found is None and died:
                raise self._died(version)
            if found is None and is_gone:
                self._waiter.raise_failure(version)
                raise TransferFailed(f"the trainer's sender gave up version {version} while it was being read")
            return found

        def missing() -> str:
            return f"; {short}" if (short := shown.progress.missing()) else ""

        return self._waiter.wait(version, deadline, look_or_fail, missing=missing)

    def _is_published(self, shown: Shown, version: Version) -> bool:
        # The name alone may be gone again already, the mark alone may be missing if its sender died.
        return shown.progress.is_published() or shown.is_at(self._place(version))

    def _map(self, version: Version) -> Shown | None:
        """Show the version when it is there, with its segment locked until the last tensor is gone."""
        place = self._place(version)
        for path in (writing_link(self._folder, version), place) if ORDERS_STORES else (place,):
            if (lock := _locked(path)) is not None:
                return self._window(lock).show(lock)
        if not place.exists() and owner_died(self._folder):
            raise self._died(version)
        return None

    def _died(self, version: Version) -> TransferFailed:
        return TransferFailed(
            f"the trainer's sender died before version {version} was in {self._folder};"
            " restart the trainer and make a new plan"
        )

    def _place(self, version: Version) -> Path:
        return self._folder / version_name(version)

    def _window(self, lock: int) -> Window:
        """Return a fresh view of a locked segment, one that was mapped before if possible: that saves page faults."""
        for window in [window for window in self._windows if window.is_gone() or window.shows(lock)]:
            if window.shows(lock) and window.is_fresh():
                return window
            self._windows.remove(window)
            window.close()
        window = Window(lock, self._form)
        # What stays mapped takes room after its sender is gone; the segments of a next plan must find theirs.
        if room_for(NUM_SEGMENTS * self._form.size):
            self._windows.append(window)
        else:
            window.close()
        return window


def _locked(path: Path) -> int | None:
    """Open and lock the segment of that name; None when there is none, or the sender is just taking it away."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    if try_lock(lock, fcntl.LOCK_SH) and is_still(lock, path):
        return lock
    os.close(lock)
    return None
