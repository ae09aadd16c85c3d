"""Checkpoints: any mesh goes on from what another has written; all that takes long is done beside training.

path/trainer            torch.distributed.checkpoint: float32 weights, moments, the reference
path/trainer/rest.pt    what is no tensor of the model: counts, the loss scale, random numbers
path/model              a Hugging Face folder, see export.py
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from areal.algorithms.update.state import load_state, save_state
from areal.contracts.durable import sync
from areal.errors import ArealError, ConfigError, JournalError, WorkerFailed, first_line
from areal_fsdp2 import boxes, export
from areal_fsdp2.boxes import Kinds
from areal_fsdp2.export import Staged
from areal_fsdp2.growing import STATE_FILE, TorchCheckpoint
from areal_fsdp2.mismatch import mismatch
from areal_fsdp2.rollcall import POLL_S, RollCall
from areal_fsdp2.shards import Part

FOLDER = "trainer"
REST = "rest.pt"
CLOSE_S = 60.0
"""How long `close` waits for what is still being written."""
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Export:
    """A folder of weights beside the checkpoint. Invariant: later updates do not change it."""

    folder: str
    weights: Staged
    describe: Callable[[Path], None]
    """Write what is no weight into the folder; called on rank 0."""
    stem: str = "model"
    """How its safetensors files are called."""
    max_bytes: int = export.MAX_FILE_BYTES
    """Of one of its files."""


class Saved(Protocol):
    """A checkpoint that is opened. Invariant: every rank finds the same."""

    rest: dict[str, Any]
    """num_updates; scale; random: one state for each rank that there was; steps: updates of each parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Of all tensors, by ``kind/name``."""

    def read(self, kinds: Kinds) -> None:
        """Fill all parts; JournalError on all ranks when a file is missing or damaged."""
        ...


class Checkpoints:
    """Invariant: one save at a time; what it writes is the state at the time of `save`."""

    def __init__(self, role: str, timeout_s: float) -> None:
        """Make a process group; all ranks do, in the same order. `timeout_s`: longest wait for another rank."""
        self._timeout_s = timeout_s
        limit, name = timedelta(seconds=timeout_s), f"{role}_checkpoints"
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit, group_desc=name))
        self._written: Future[None] | None = None
        self._num_saves = 0
        self._roll_call: RollCall
        self._path = Path()
        self._exports: Sequence[Export] = ()

    def save(self, path: Path, kinds: Kinds, rest: dict[str, Any], exports: Sequence[Export]) -> None:
        """Copy everything and begin to write it; `finish` is next. All ranks call it.

        `rest` has what each rank knows for itself: ``random`` and ``steps``. JournalError on all ranks when one cannot
        write.
        """
        self.finish()
        self._path, self._exports = path, exports
        everybody = self._gathered({"random": rest["random"], "steps": rest["steps"]})
        steps = {name: step for told in everybody for name, step in told["steps"].items()}
        self._on_first(lambda: self._begin({**rest, "random": [told["random"] for told in everybody], "steps": steps}))
        self._num_saves += 1
        self._roll_call = RollCall(f"{self._group.group_name}/{self._num_saves}")
        copies = boxes.copied(kinds)
        self._written = _in_background(lambda: boxes.write(copies, _new(path / FOLDER), self._group))

    def finish(self) -> None:
        """Wait until the last `save` is whole on disk, then give its folders their names; nothing to do: return.

        Raises JournalError on all ranks when one could not write its part, WorkerFailed that names those which are
        gone; then the folders that were there stay.
        """
        if self._written is None:
            return
        future, self._written = self._written, None
        self._wait(future)
        self._wait(_in_background(self._end))
        self._exports = ()

    def open(self, path: Path, weights: Sequence[Part], model: str) -> Saved:
        """Return what there is to read; `weights`: what this rank wants of kind ``weights``; `model`: for the user.

        Raises on all ranks JournalError when it is not there or damaged, ConfigError when it is of another model.
        """
        wanted = {part.name: part.shape for part in weights}
        everybodys = {name: shape for told in self._gathered(wanted) for name, shape in told.items()}

        def opened() -> Saved:
            is_grown = not (path / FOLDER).is_dir() and (path / STATE_FILE).is_file()
            saved = TorchCheckpoint(path) if is_grown else _Own(path, self._group)
            kind = "weights/"
            held = {key.removeprefix(kind): shape for key, shape in saved.shapes.items() if key.startswith(kind)}
            if problem := mismatch(held, everybodys, model):
                raise ConfigError(f"the checkpoint {str(path)!r} {problem}")
            return saved

        return self._together(opened)

    def close(self) -> None:
        """Wait for what is still being written, so that nothing uses the process group any more."""
        if self._written is not None:
            wait([self._written], CLOSE_S)
            self._written = None

    def _begin(self, rest: dict[str, Any]) -> None:
        """Make the folders, with what is in them beside tensors."""
        self._path.mkdir(parents=True, exist_ok=True)
        for name in self._folders():
            for leftover in (_new(self._path / name), _old(self._path / name)):
                shutil.rmtree(leftover, ignore_errors=True)
            _new(self._path / name).mkdir()
        for found in self._exports:
            found.describe(_new(self._path / found.folder))
        save_state(rest, _new(self._path / FOLDER) / REST)

    def _wait(self, future: Future[None]) -> None:
        """Wait for a thread of this rank, as long as all ranks are there; raises its error."""
        end = time.monotonic() + self._timeout_s
        while not wait([future], POLL_S).done:
            # Who waits for a rank that has given up, because another is gone, gets no error.
            if self._roll_call.is_on() or time.monotonic() > end:
                raise self._lost(f"it took {self._timeout_s:g} s" if time.monotonic() > end else "says another rank")
        try:
            future.result()
        except RuntimeError as error:
            raise self._lost(first_line(error)) from error

    def _lost(self, problem: str) -> WorkerFailed:
        missing = self._roll_call.missing()
        who = f"trainer rank {', '.join(map(str, missing))} was lost" if missing else "the ranks lost each other"
        return WorkerFailed(f"{who} while the checkpoint {str(self._path)!r} was written ({problem})")

    def _end(self) -> None:
        self._together(self._export)
        self._on_first(self._settle)

    def _export(self) -> None:
        """Write this rank's files of all exports, and take part in the others'."""
        problem: OSError | None = None
        for found in self._exports:
            try:
                export.write(found.weights, _new(self._path / found.folder), found.stem, self._group, found.max_bytes)
            except OSError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _settle(self) -> None:
        """Give the folders their names, each when all of it is on the disk."""
        for folder in (self._path / name for name in self._folders()):
            for file in (*_new(folder).iterdir(), _new(folder)):
                sync(file)
            if folder.exists():
                folder.rename(_old(folder))
            _new(folder).rename(folder)
            sync(self._path)
            shutil.rmtree(_old(folder), ignore_errors=True)

    def _folders(self) -> list[str]:
        return [FOLDER, *(found.folder for found in self._exports)]

    def _gathered(self, told: Any) -> list[Any]:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, told, group=self._group)
        return everybody

    def _together(self, work: Callable[[], Found]) -> Found:
        """Do something on all ranks; if it fails on some, raise the first one's error on all."""
        found: list[Found] = []
        problem: ArealError | None = None
        try:
            found.append(work())
        except ArealError as error:
            problem = error
        except OSError as error:
            problem = JournalError(f"rank {dist.get_rank()} cannot write {str(self._path)!r}: {first_line(error)}")
        for other in self._gathered(problem):
            if other is not None:
                raise other
        return found[0]

    def _on_first(self, work: Callable[[], None]) -> None:
        self._together(work if dist.get_rank() == 0 else lambda: None)


class _Own:
    """What a backend of this kind has saved. Invariant: every rank finds the same."""

    def __init__(self, path: Path, group: dist.ProcessGroup) -> None:
        self._folder = path / FOLDER
        self._group = group
        self.rest = load_state(path, f"{FOLDER}/{REST}", "fsdp2")
        self.shapes = boxes.shapes(self._folder)

    def read(self, kinds: Kinds) -> None:
        boxes.read(kinds, self._folder, self._group)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Start a thread; one that waits for a rank that is gone keeps no process from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _new(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
