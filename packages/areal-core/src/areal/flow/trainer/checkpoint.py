"""Checkpoints: written beside, renamed when whole, and only then pointed at.

begin     trainer: save                              the trainer waits for this much
finish    trainer: finish_save ─ seal ─ sync ─ rename ─ pointer        beside the next steps
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from areal.contracts.cluster import Calls
from areal.contracts.durable import sync
from areal.errors import JournalError
from areal.flow.trainer.checksums import seal


class Ledger(Protocol):
    """The journal as checkpoints see it. Invariant: `checkpointed` is durable when it returns."""

    def checkpointed(self, step: int, path: str) -> None: ...

    def checkpoints(self) -> list[tuple[int, str]]: ...

    def forget_checkpoint(self, step: int) -> None: ...

    def compact(self, oldest_needed_step: int, max_bytes: int) -> bool: ...


class Checkpoints:
    """Invariant: the newest checkpoint that the ledger names is whole on disk, whenever the machine stops."""

    def __init__(
        self,
        trainer: Calls,
        ledger: Ledger,
        folder: Path,
        keep: int,
        deadline_s: float,
        ledger_bytes: int = 0,
    ) -> None:
        """`ledger_bytes`: size above which the ledger drops what no kept checkpoint could need; 0: never."""
        self._trainer = trainer
        self._ledger = ledger
        self._folder = folder
        self._keep = keep
        self._deadline_s = deadline_s
        self._ledger_bytes = ledger_bytes

    async def save(self, step: int) -> Path:
        """Save the trainer's state of `step` and return the folder, once it is the newest checkpoint.

        Raises JournalError when the run's folder cannot be written; the checkpoint before stays the newest.
        """
        await self.begin(step)
        return await self.finish(step)

    async def begin(self, step: int) -> None:
        """Save so much of the state of `step` that the trainer may go on; raises as `save`.

        `finish` comes before the next `begin`, or `give_up`.
        """
        if self._has(step):
            return
        unfinished = self._unfinished(step)
        with self._naming(step):
            for leftover in (unfinished, self._final(step)):
                shutil.rmtree(leftover, ignore_errors=True)
            unfinished.mkdir(parents=True)
            await self._trainer.call("save", str(unfinished), deadline_s=self._deadline_s)

    async def finish(self, step: int) -> Path:
        """Wait until all is on disk, and only then name the checkpoint; return its folder. Raises as `save`."""
        final = self._final(step)
        if self._has(step):
            return final
        with self._naming(step):
            await self._trainer.call("finish_save", deadline_s=self._deadline_s)
            await asyncio.to_thread(_settle, self._unfinished(step), final)
        # Relative, so that a run's folder can be moved.
        self._ledger.checkpointed(step, f"{self._folder.name}/{final.name}")
        self._prune()
        await self._compact()
        return final

    def give_up(self, step: int) -> None:
        """Forget what was begun; the checkpoint before stays the newest."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def _has(self, step: int) -> bool:
        return any(saved == step for saved, _ in self._ledger.checkpoints())

    def _final(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _unfinished(self, step: int) -> Path:
        return self._final(step).with_suffix(".tmp")

    @contextmanager
    def _naming(self, step: int) -> Generator[None]:
        """Let what cannot be written be one JournalError that says what to do."""
        try:
            yield
        except (OSError, JournalError) as error:
            # What is half written may be what fills the disk, and the journal needs room to close.
            self.give_up(step)
            what = (error.strerror if isinstance(error, OSError) else None) or error
            there = bool(self._ledger.checkpoints())
            again = f"go on with: areal resume {self._folder.parent}" if there else "start anew with: areal run"
            raise JournalError(
                f"checkpoint {self._final(step)} cannot be written: {what}; "
                f"{'the one before stays; ' if there else ''}see that its disk has room and can be written, and {again}"
            ) from error

    async def _compact(self) -> None:
        """Let the ledger become small enough, a little at a time: generation goes on."""
        if not self._ledger_bytes:
            return
        oldest, _ = self._ledger.checkpoints()[0]
        more = True
        while more:
            more = self._ledger.compact(oldest, self._ledger_bytes)
            await asyncio.sleep(0)

    def _prune(self) -> None:
        for step, path in self._ledger.checkpoints()[: -self._keep]:
            # First the pointer, then the data: the ledger never names what is gone.
            self._ledger.forget_checkpoint(step)
            shutil.rmtree(self._folder.parent / path, ignore_errors=True)


def _settle(unfinished: Path, final: Path) -> None:
    """Give a checkpoint its name once all of it is on the disk."""
    seal(unfinished)
    _sync_tree(unfinished)
    unfinished.rename(final)
    sync(final.parent)


def _sync_tree(folder: Path) -> None:
    """Bring every file below a folder to the disk; one that is there already costs nothing."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
