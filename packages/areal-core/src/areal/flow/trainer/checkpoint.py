"""Checkpoints: written beside, renamed when whole, and only then pointed at."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Protocol

from areal.contracts.cluster import Calls
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
        """Save the trainer's state of `step`; the trainer waits, generation goes on. Returns the folder.

        Raises JournalError when the run's folder cannot be written; the checkpoint before stays the newest.
        """
        name = f"step-{step:08d}"
        final = self._folder / name
        if any(saved == step for saved, _ in self._ledger.checkpoints()):
            return final
        try:
            await self._write(final)
        except (OSError, JournalError) as error:
            # What is half written may be what fills the disk, and the journal needs room to close.
            shutil.rmtree(final.with_suffix(".tmp"), ignore_errors=True)
            what = (error.strerror if isinstance(error, OSError) else None) or error
            there = bool(self._ledger.checkpoints())
            again = f"go on with: areal resume {self._folder.parent}" if there else "start anew with: areal run"
            raise JournalError(
                f"checkpoint {final} cannot be written: {what}; {'the one before stays; ' if there else ''}see that "
                f"its disk has room and can be written, and {again}"
            ) from error
        # Relative, so that a run's folder can be moved.
        self._ledger.checkpointed(step, f"{self._folder.name}/{name}")
        self._prune()
        await self._compact()
        return final

    async def _compact(self) -> None:
        """Let the ledger become small enough, a little at a time: generation goes on."""
        if not self._ledger_bytes:
            return
        oldest, _ = self._ledger.checkpoints()[0]
        more = True
        while more:
            more = self._ledger.compact(oldest, self._ledger_bytes)
            await asyncio.sleep(0)

    async def _write(self, final: Path) -> None:
        unfinished = final.with_suffix(".tmp")
        for leftover in (unfinished, final):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        await self._trainer.call("save", str(unfinished), deadline_s=self._deadline_s)
        await asyncio.to_thread(seal, unfinished)
        await asyncio.to_thread(_sync_tree, unfinished)
        unfinished.rename(final)
        _sync(self._folder)

    def _prune(self) -> None:
        for step, path in self._ledger.checkpoints()[: -self._keep]:
            # First the pointer, then the data: the ledger never names what is gone.
            self._ledger.forget_checkpoint(step)
            shutil.rmtree(self._folder.parent / path, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    """Bring every file below a folder to the disk; one that is there already costs nothing."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
