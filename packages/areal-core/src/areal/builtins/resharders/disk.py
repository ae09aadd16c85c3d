"""The resharder `disk`: weights through a folder of safetensors files.

What a trainer of one rank writes, transformers can load as well. Of several ranks each writes its own pieces into files
of its own: two hosts that write into the same page of one file do not see each other on every shared file system.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

from areal.builtins.resharders.locks import holder_died, own
from areal.builtins.resharders.pieces import Assembly, Item, check_pieces, items_of, sending_ranks
from areal.builtins.resharders.ranks import Lead, Seat
from areal.builtins.resharders.versions import Waiter, attempt, version_name
from areal.builtins.resharders.weight_files import split, write_index, write_weights
from areal.builtins.resharders.wire import Deadline, check_members
from areal.contracts.durable import sync
from areal.contracts.messages import Version
from areal.contracts.options import Options
from areal.contracts.transfer import Layout, Plan, Receipt, TensorSpec, pieces_of
from areal.errors import TransferFailed


class DiskOptions(Options):
    """Invariant: the newest version is always among those kept."""

    folder: str = ""
    """Where versions are written, on a file system that all hosts see; empty: ``weights`` in the run's folder."""
    keep: int = Field(default=2, ge=1)
    """Newest versions that stay; a receiver may still be reading the one before the newest."""
    max_file_bytes: int = Field(default=5 * 2**30, ge=1)
    """Bytes of weights above which a version is split into several files with an index."""


class DiskResharder:
    """Slow, and works wherever both sides see one folder. Invariant: a version's name appears when it is whole."""

    def __init__(self, options: DiskOptions | None, run_dir: str) -> None:
        self._options = options or DiskOptions()
        self._run_dir = run_dir

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        """Choose the folder; TransferFailed when there is none or the members cannot be served."""
        check_members(source, targets)
        check_pieces(source)
        if not (self._options.folder or self._run_dir):
            raise TransferFailed(
                "the resharder 'disk' has no folder to write to; set its option folder or a run folder"
            )
        folder = Path(self._options.folder) if self._options.folder else Path(self._run_dir) / "weights"
        details = {
            "folder": str(folder.absolute()),
            "keep": self._options.keep,
            "max_file_bytes": self._options.max_file_bytes,
        }
        return Plan(uid=uuid.uuid4().hex, source=source, targets=tuple(targets), details=details)

    def sender(self, plan: Plan, rank: int = 0) -> DiskSender | DiskHelper:
        leads = rank == sending_ranks(plan.source)[0]
        return DiskSender(plan, rank) if leads else DiskHelper(plan, rank)

    def receiver(self, plan: Plan, member: int) -> DiskReceiver:
        return DiskReceiver(plan, member)


class DiskSender:
    """The first rank's half. Invariant: readers of the `keep` newest versions are never disturbed, whatever
    interrupts a write.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self._plan = plan
        self._folder = Path(plan.details["folder"])
        self._files = rank_files(plan, rank)
        self._others = sending_ranks(plan.source)[1:]
        self._meeting = meeting_folder(plan)
        self._lead = Lead(self._meeting, self._others)
        self._owner: int | None = None
        self._deadline = Deadline(0.0)

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Write this rank's pieces aside and put them on disk; when all ranks have, rename into place and prune.

        `deadline_s` is checked when the files are written: the operating system cannot be hurried. TransferFailed.
        """
        deadline = self._deadline = Deadline(deadline_s)
        draft = self._folder / f"{version_name(version)}.tmp-{os.getpid()}"
        with attempt(self._folder, self._plan.uid, version), self._lead.attempt(version):
            shutil.rmtree(draft, ignore_errors=True)  # of a killed sender that had the same process id
            try:
                draft.mkdir(parents=True)
                self._open()
                self._lead.invite({"draft": draft.name})
                checksums = _write(draft, self._files, tensors, self._plan.uid, version, deadline)
                self._lead.wait(deadline)
                if not self._plan.source.pieces and len(self._files) > 1:
                    write_index(draft, self._files)
                self._publish(version, draft)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self._prune(version)
        return _receipt(version, self._files, checksums, deadline)

    def interrupt(self) -> None:
        """Wait no longer for the other ranks."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the other ranks; the kept versions stay for people and for restarted engines. Idempotent."""
        if self._owner is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)
            os.close(self._owner)
            self._owner = None

    def _open(self) -> None:
        """Own the folder in which the ranks meet, if there are several."""
        if not self._others or self._owner is not None:
            return
        for folder in self._folder.glob("ranks-*"):
            if holder_died(folder / "owner"):
                shutil.rmtree(folder, ignore_errors=True)
        self._meeting.mkdir(exist_ok=True)
        self._owner = own(self._meeting / "owner")
        if self._owner is None:
            raise TransferFailed(f"another sender of this plan is alive and holds {self._meeting}; close it first")

    def _publish(self, version: Version, draft: Path) -> None:
        place = self._folder / version_name(version)
        if place.exists():  # written by an attempt or a run before; a folder can only be renamed over an empty one
            old = self._folder / f"{place.name}.tmp-old-{os.getpid()}"
            place.rename(old)
            draft.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        else:
            draft.rename(place)
        sync(self._folder)

    def _prune(self, version: Version) -> None:
        """Drop versions beyond `keep`, those of a future that a resumed run took back, and dead drafts."""
        current = version_name(version)
        names = sorted(path.name for path in self._folder.glob("v????????"))
        kept = [name for name in names if name <= current][-self._plan.details["keep"] :]
        stale = [self._folder / name for name in names if name not in kept]
        for path in (*stale, *self._folder.glob("v????????.tmp-*")):
            shutil.rmtree(path, ignore_errors=True)
        for marker in self._folder.glob("v????????.failed*"):
            marker.unlink(missing_ok=True)


class DiskHelper:
    """Another rank's half. Invariant: writes files of its own only, into the draft that the first rank made."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._folder = Path(plan.details["folder"])
        self._files = rank_files(plan, rank)
        self._is_needed = bool(pieces_of(plan.source, rank))
        self._seat = Seat(meeting_folder(plan), rank, sending_ranks(plan.source)[0])
        self._deadline = Deadline(0.0)

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Write this rank's pieces and put them on disk; returns when the version is published. TransferFailed."""
        deadline = self._deadline = Deadline(deadline_s)
        if not self._is_needed:
            return Receipt(version=version, checksums={})
        draft = self._folder / self._seat.join(version, deadline)["draft"]
        with self._seat.writing(version):
            checksums = _write(draft, self._files, tensors, self._plan.uid, version, deadline)
        self._seat.wait(version, deadline)
        return _receipt(version, self._files, checksums, deadline)

    def interrupt(self) -> None:
        """Wait no longer for the first rank."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the other ranks. Idempotent."""
        self._seat.close()


def meeting_folder(plan: Plan) -> Path:
    return Path(plan.details["folder"]) / f"ranks-{plan.uid}"


def rank_files(plan: Plan, rank: int) -> dict[str, list[Item]]:
    """Return file name -> what a rank writes into it; of a trainer with several ranks each has files of its own."""
    stem = f"rank-{rank:05d}" if plan.source.pieces else "model"
    return split(items_of(plan, rank), plan.details["max_file_bytes"], stem)


def _write(
    draft: Path,
    files: dict[str, list[Item]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    plan_uid: str,
    version: Version,
    deadline: Deadline,
) -> dict[str, int]:
    checksums = write_weights(draft, files, tensors, plan_uid)
    if deadline.left_s == 0:
        raise TransferFailed(
            f"the trainer's sender wrote version {version} in {deadline.elapsed_s:.0f} s,"
            f" longer than the {deadline.seconds:g} s it had; raise the deadline or use a faster disk"
        )
    return checksums


def _receipt(version: Version, files: dict[str, list[Item]], checksums: dict[str, int], deadline: Deadline) -> Receipt:
    size = sum(item.num_bytes for group in files.values() for item in group)
    return Receipt(version=version, checksums=checksums, num_bytes=size, seconds=deadline.elapsed_s)


class DiskReceiver:
    """Invariant: reads only files that this plan's sender wrote, never leftovers of an earlier life of the run."""

    def __init__(self, plan: Plan, member: int) -> None:
        self._plan = plan
        self._member = member
        self._deadline = Deadline(0.0)
        self._folder = Path(plan.details["folder"])
        ranks = sending_ranks(plan.source)
        self._files = {name: items for rank in ranks for name, items in rank_files(plan, rank).items()}
        self._waiter = Waiter(self._folder, plan.uid)

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the version and yield its tensors on the CPU: whole ones mapped from the files, others put together.

        Raises TransferFailed.
        """
        self._deadline = Deadline(deadline_s)
        return self._read(version, self._deadline)

    def interrupt(self) -> None:
        """Wait no longer."""
        self._deadline.end()

    def close(self) -> None:
        """Nothing is held between versions."""

    def _read(self, version: Version, deadline: Deadline) -> Iterator[tuple[str, torch.Tensor]]:
        place = self._folder / version_name(version)
        self._waiter.wait(version, deadline, lambda: self._is_ours(place) or None)
        assembly = Assembly(self._plan, torch.device("cpu"))
        order = sorted(
            ((item, name) for name, items in self._files.items() for item in items),
            key=lambda pair: pair[0].piece.tensor,
        )
        try:
            with ExitStack() as stack:
                open_file = partial(safe_open, framework="pt", device="cpu")
                files = {name: stack.enter_context(open_file(place / name)) for name in self._files}
                for item, name in order:
                    yield from assembly.add(item, _expect(files[name].get_tensor(item.name), item.spec), keep=True)
                yield from assembly.rest()
        except (OSError, SafetensorError) as error:
            raise TransferFailed(
                f"engine {self._member} cannot read version {version} in {place}: {error}; publish it again"
            ) from error

    def _is_ours(self, place: Path) -> bool:
        first = place / next(iter(self._files))
        if not place.is_dir():
            return False
        try:
            with safe_open(first, framework="pt", device="cpu") as file:
                return (file.metadata() or {}).get("plan") == self._plan.uid
        except FileNotFoundError:
            return False  # another plan splits its files otherwise, or the folder is just being replaced
        except (OSError, SafetensorError) as error:
            raise TransferFailed(
                f"engine {self._member} cannot read {first}: {error}; publish the version again"
            ) from error


def _expect(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if found != (spec.shape, spec.dtype):
        raise TransferFailed(f"{spec.name!r} was written as {found}, but the plan says {(spec.shape, spec.dtype)}")
    return tensor
