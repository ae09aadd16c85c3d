"""The trainer as everybody else knows it: who sits there may change, the seat stays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from areal.contracts.cluster import Handle
from areal.contracts.transfer import Layout
from areal.errors import TrainerLost
from areal.flow.trainer.group import RankLost, ask_all

Spawn = Callable[[str, int], Awaitable[Handle]]
"""Starts the trainer's rank of this name and number and returns its handle; it has not loaded its model yet."""
RENDEZVOUS_S = 60.0
"""For a rank to choose a port, while its process may still be importing."""
NOBODY: Mapping[str, Handle] = MappingProxyType({})


class TrainerSeat:
    """One trainer of one or several ranks, which come and go together.

    Invariant: once any rank is lost, none is left, and every call raises TrainerLost until `fill` has put others here.
    """

    def __init__(self, spawn: Spawn, num_ranks: int = 1) -> None:
        self._spawn = spawn
        self._num_ranks = num_ranks
        self._names = itertools.count()
        self._reason = "it has not been started"
        self.name = "trainer"
        """That of the trainer that sits here, or was the last to: its rank 0's."""
        self.culprit = self.name
        """The rank with which the last one was lost."""
        self.ranks: Mapping[str, Handle] = NOBODY
        """Whoever sits here, by name, rank 0 first; empty when nobody does."""

    async def fill(self) -> None:
        """Start a trainer; its model is not loaded. WorkerFailed in one sentence, and then no rank of it is left."""
        self.name = self.culprit = f"trainer-{next(self._names)}"
        names = [self.name, *(f"{self.name}.{rank}" for rank in range(1, self._num_ranks))]
        spawning = (self._spawn(name, rank) for rank, name in enumerate(names))
        spawned = await asyncio.gather(*spawning, return_exceptions=True)
        there = {n: found for n, found in zip(names, spawned, strict=True) if not isinstance(found, BaseException)}
        if failures := [found for found in spawned if isinstance(found, BaseException)]:
            await _end(there)
            raise failures[0]
        self.ranks = there

    async def start(self, deadline_s: float) -> Layout:
        """Have all ranks meet and load their model; return the trainer's layout. Raises what `call` does.

        Where they meet is new for each trainer: what is left of an earlier one cannot disturb it.
        """
        where = ""
        if len(self.check()) > 1:
            where = await self.call_first("rendezvous", deadline_s=RENDEZVOUS_S)
        await self.call("make", where, deadline_s=deadline_s)
        return await self.call("start", deadline_s=deadline_s)

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method of all ranks and return rank 0's answer; of receipts one for all.

        Raises what a rank raises; TrainerLost when one dies, or all are ended because a deadline passed.
        """
        return await self._ask(self.check(), method, args, deadline_s)

    async def call_first(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method of rank 0 only; raises as `call`."""
        return await self._ask(dict([*self.check().items()][:1]), method, args, deadline_s)

    async def _ask(
        self, ranks: Mapping[str, Handle], method: str, args: Sequence[Any], deadline_s: float | None
    ) -> Any:
        try:
            return await ask_all(ranks, method, args, deadline_s)
        except RankLost as lost:
            await self.lost(lost.name, lost.reason)
            if lost.error is not None:
                raise lost.error from None
            raise TrainerLost(self._reason) from lost  # whoever ended it has said why

    def check(self) -> Mapping[str, Handle]:
        """Return the trainer's ranks; TrainerLost when it is gone."""
        if not self.ranks:
            raise TrainerLost(self._reason)
        return self.ranks

    async def lost(self, name: str, reason: str) -> bool:
        """Clear the seat and end all ranks; return whether this one was among those that sat here."""
        if name not in self.ranks:
            return False
        ranks, self.ranks = self.ranks, NOBODY
        self.culprit = name
        self._reason = reason if len(ranks) == 1 or name in reason else f"{name}: {reason}"
        await _end(ranks)
        return True


async def _end(ranks: Mapping[str, Handle]) -> None:
    await asyncio.gather(*(handle.kill() for handle in ranks.values()))
