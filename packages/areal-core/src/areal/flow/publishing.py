"""Versions on their way: what the trainer has learned reaches the engines beside its next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from areal.contracts.messages import Version
from areal.errors import TrainerLost, TransferFailed
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
        wake: Callable[[], None],
    ) -> None:
        """`told`: of each version that is committed; `wake`: called when a version has not arrived."""
        self._publisher = publisher
        self._fleet = fleet
        self._journal = journal
        self._pacing = pacing
        self._keeper = keeper
        self._sharing = sharing
        self._told = told
        self._wake = wake
        self._committing: asyncio.Task[None] | None = None
        self._num_failed = 0
        """Publishes in a row that did not arrive."""
        self.metrics: Mapping[str, float] = {}
        """Of the last commit."""

    async def publish(self, tasks: TaskSet, version: Version) -> None:
        """Begin to send the trainer's weights to all engines; the rest runs beside what the caller does next.

        Raises TransferFailed when the trainer cannot even begin, TrainerLost when it is gone. A version that does not
        arrive is made up for by `bring_up`, or by the next one; ATTEMPTS in a row end `tasks` with TransferFailed.
        """
        async with self._sharing.trainers_turn():
            staged = await self._stage(version, ATTEMPTS)
        self._committing = tasks.start(self._commit(staged, version))
        if self._sharing.is_shared:
            await self.committed()  # the next step takes the device

    async def bring_up(self, tasks: TaskSet, version: Version) -> None:
        """Give the trainer's weights, which are `version`, to engines that do not have them yet."""
        if self._fleet.joining or self._num_failed:
            await self.committed()
            if self._fleet.joining or self._num_failed:  # that publish was made without them
                await self.publish(tasks, version)

    async def committed(self) -> None:
        """Wait until the last publish is committed, or has failed; its own deadlines end it."""
        if self._committing is not None:
            await asyncio.shield(self._committing)  # whoever waits may be told not to; the commit goes on

    async def settled(self, tasks: TaskSet, version: Version) -> None:
        """Wait until the trainer's weights, which are `version`, are committed; raises as `publish`."""
        await self.committed()
        while self._num_failed:
            await self.publish(tasks, version)
            await self.committed()

    async def serving(self, version: Version) -> None:
        """Wait until engines serve this version or a later one."""
        await self.committed()
        while self._pacing.served < version:
            await asyncio.sleep(PAUSE_S)
            await self.committed()

    def begin_anew(self) -> None:
        """Another trainer sends from now on."""
        self._num_failed = 0
        self._publisher.forget_plan()

    async def _stage(self, version: Version, attempts: int) -> Staged | None:
        targets = [
            Target(name=name, handle=member.handle, layout=member.layout)
            for name, member in self._fleet.members.items()
        ]
        if not targets:
            return None
        try:
            staged = await self._publisher.stage(version, targets)
            if self._sharing.is_shared:
                await staged.arrived()  # what it sends from is the engines' next
            return staged
        except TransferFailed:
            if attempts == 1:
                raise
            # An engine that died on the way breaks the sender too; the keeper takes it out meanwhile.
            await asyncio.sleep(PAUSE_S)
            return await self._stage(version, attempts - 1)

    async def _commit(self, staged: Staged | None, version: Version) -> None:
        try:
            if staged is not None:
                await staged.arrived()
        except TrainerLost:
            return  # whoever uses the trainer next hears of it
        except TransferFailed:
            self._num_failed += 1
            if self._num_failed == ATTEMPTS:
                raise
            await asyncio.sleep(PAUSE_S)
            self._wake()
            return
        if staged is not None:
            with self._fleet.held():
                published = await staged.commit()
            self.metrics = published.metrics
            for name, reason in published.failed.items():
                await self._keeper.lost(name, reason)
            await self._fleet.committed(list(published.committed))
        self._num_failed = 0
        self._journal.published(version)
        self._pacing.publish(version)
        self._told(version)
