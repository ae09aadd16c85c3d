"""The resharder `disk`: weights through a folder of safetensors files, which transformers can load as well."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

from areal.builtins.resharders.versions import Waiter, attempt, version_name
from areal.builtins.resharders.weight_files import split, sync_folder, write_weights
from areal.builtins.resharders.wire import Deadline, check_members, num_bytes, wire_specs
from areal.contracts.messages import Version
from areal.contracts.options import Options
from areal.contracts.transfer import Layout, Plan, Receipt, TensorSpec
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

    def sender(self, plan: Plan, rank: int = 0) -> DiskSender:
        return DiskSender(plan)

    def receiver(self, plan: Plan, member: int) -> DiskReceiver:
        return DiskReceiver(plan, member)


class DiskSender:
    """Invariant: readers of the `keep` newest versions are never disturbed, whatever interrupts a write."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder = Path(plan.details["folder"])

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Write the version aside, put it on disk, rename it into place, prune; TransferFailed.

        `deadline_s` is checked when the files are written: the operating system cannot be hurried.
        """
        deadline = Deadline(deadline_s)
        specs = wire_specs(self._plan)
        draft = self._folder / f"{version_name(version)}.tmp-{os.getpid()}"
        with attempt(self._folder, self._plan.uid, version):
            shutil.rmtree(draft, ignore_errors=True)  # of a killed sender that had the same process id
            try:
                draft.mkdir(parents=True)
                metadata = {"format": "pt", "plan": self._plan.uid}
                checksums = write_weights(draft, specs, tensors, self._plan.details["max_file_bytes"], metadata)
                if deadline.left_s == 0:
                    raise TransferFailed(
                        f"the trainer's sender wrote version {version} in {deadline.elapsed_s:.0f} s,"
                        f" longer than the {deadline_s:g} s it had; raise the deadline or use a faster disk"
                    )
                self._publish(version, draft)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self._prune(version)
        size = sum(map(num_bytes, specs))
        return Receipt(version=version, checksums=checksums, num_bytes=size, seconds=deadline.elapsed_s)

    def close(self) -> None:
        """Nothing is held between versions; the kept ones stay for people and for restarted engines."""

    def _publish(self, version: Version, draft: Path) -> None:
        place = self._folder / version_name(version)
        if place.exists():  # written by an attempt or a run before; a folder can only be renamed over an empty one
            old = self._folder / f"{place.name}.tmp-old-{os.getpid()}"
            place.rename(old)
            draft.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        else:
            draft.rename(place)
        sync_folder(self._folder)

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


class DiskReceiver:
    """Invariant: reads only files that this plan's sender wrote, never leftovers of an earlier life of the run."""

    def __init__(self, plan: Plan, member: int) -> None:
        self._plan = plan
        self._member = member
        self._deadline = Deadline(0.0)
        self._folder = Path(plan.details["folder"])
        self._files = split(wire_specs(plan), plan.details["max_file_bytes"])
        self._waiter = Waiter(self._folder, plan.uid)

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the version and yield its tensors, mapped from the files, on the CPU; TransferFailed."""
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
        try:
            with ExitStack() as stack:
                for name, specs in self._files.items():
                    file = stack.enter_context(safe_open(place / name, framework="pt", device="cpu"))
                    for spec in specs:
                        yield spec.name, _expect(file.get_tensor(spec.name), spec)
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
