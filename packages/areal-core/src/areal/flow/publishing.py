"""Versions on their way: what the trainer has learned reaches the engines beside its next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from areal.contracts.messages import Version
from areal.errors import TransferFailed
from areal.flow.buffer.journal import Journal
from areal.flow.engine.fleet import Fleet
from areal.flow.keeper import Keeper
from areal.flow.prompts.pacing import Pacing
from areal.flow.sharing import OwnDevices
from areal.flow.tasks import TaskSet
from areal.flow.weights.publisher import Publisher, Staged, Target

ATTEMPTS = 5
PAUSE_S = 1.0
"""A cluster notices a death within about two seconds."""


class Publishing:
    """Invariant: at most one version is being committed, and prompts are paced by the last one that was."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        fleet: Fleet,
        journal: Journal,
        pacing: Pacing,
        keeper: Keeper,
        sharing: OwnDevices,
        told: Callable[[Version], None],
    ) -> None:
        self._publisher = publisher
        self._fleet = fleet
        self._journal = journal
        self._pacing = pacing
        self._keeper = keeper
        self._sharing = sharing
        self._told = told
        self._committing: asyncio.Task[None] | None = None
        self.metrics: Mapping[str, float] = {}
        """Of the last commit."""

    async def publish(self, tasks: TaskSet, version: Version) -> None:
        """Send the trainer's weights to all engines; committing them runs beside what the caller does next.

        Raises TransferFailed when the trainer cannot send them, TrainerLost when it is gone.
        """
        async with self._sharing.trainers_turn():
            staged = await self._stage(version, ATTEMPTS)
        self._committing = tasks.start(self._commit(staged, version))
        if self._sharing.is_shared:
            await self.committed()  # the next step takes the device

    async def bring_up(self, tasks: TaskSet, version: Version) -> None:
        """Give the trainer's weights to engines that have come since the last publish."""
        if self._fleet.joining:
            await self.committed()
            if self._fleet.joining:  # that publish was made without them
                await self.publish(tasks, version)

    async def committed(self) -> None:
        """Wait until the last publish is committed; its own deadlines end it."""
        if self._committing is not None:
            await asyncio.shield(self._committing)  # whoever waits may be told not to; the commit goes on

    def begin_anew(self) -> None:
        """Another trainer sends from now on."""
        self._publisher.forget_plan()

    async def _stage(self, version: Version, attempts: int) -> Staged | None:
        targets = [
            Target(name=name, handle=member.handle, layout=member.layout)
            for name, member in self._fleet.members.items()
        ]
        if not targets:
            return None
        try:
            return await self._publisher.stage(version, targets)
        except TransferFailed:
            if attempts == 1:
                raise
            # An engine that died on the way breaks the sender too; the keeper takes it out meanwhile.
            await asyncio.sleep(PAUSE_S)
            return await self._stage(version, attempts - 1)

    async def _commit(self, staged: Staged | None, version: Version) -> None:
        if staged is not None:
            with self._fleet.held():
                published = await staged.commit()
            self.metrics = published.metrics
            for name, reason in published.failed.items():
                await self._keeper.lost(name, reason)
            await self._fleet.committed(list(published.committed))
        self._journal.published(version)
        self._pacing.publish(version)
        self._told(version)
