"""Checkpoints on their way: what the trainer has saved becomes the newest checkpoint beside its next steps."""

from __future__ import annotations

import asyncio

from areal.errors import TrainerLost
from areal.flow.tasks import TaskSet
from areal.flow.trainer.checkpoint import Checkpoints


class Saving:
    """Invariant: at most one checkpoint is being written."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._finishing: asyncio.Task[None] | None = None

    async def begin(self, tasks: TaskSet, step: int) -> None:
        """Have the trainer save the state of `step`; the rest is done beside what the caller does next.

        Raises TrainerLost when the trainer is gone. JournalError, here or as the end of `tasks`, when the run's folder
        cannot be written.
        """
        await self.finished()
        await self._checkpoints.begin(step)
        self._finishing = tasks.start(self._finish(step))

    async def finished(self) -> None:
        """Wait until the last one is the newest checkpoint, or was given up with its trainer; it has deadlines."""
        if self._finishing is not None:
            await asyncio.shield(self._finishing)

    async def save(self, step: int) -> None:
        """Save the state of `step` and wait until it is the newest checkpoint; raises as `begin`."""
        await self.finished()
        await self._checkpoints.save(step)

    async def _finish(self, step: int) -> None:
        try:
            await self._checkpoints.finish(step)
        except TrainerLost:  # whoever uses the trainer next hears of it
            self._checkpoints.give_up(step)
