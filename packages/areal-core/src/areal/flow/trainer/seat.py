"""The trainer as everybody else knows it: who sits there may change, the seat stays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from areal.contracts.cluster import Handle
from areal.errors import TrainerLost, WorkerDied

Spawn = Callable[[str], Awaitable[Handle]]
"""Starts a trainer of this name and returns its handle; it has not loaded its model yet."""


class TrainerSeat:
    """Invariant: once the trainer is lost, every call raises TrainerLost until `fill` has put another one here."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._names = itertools.count()
        self._reason = "it has not been started"
        self.name = "trainer"
        """That of the trainer that sits here, or was the last to."""
        self.handle: Handle | None = None

    async def fill(self) -> None:
        """Start a trainer; its model is not loaded. WorkerFailed in one sentence."""
        self.name = f"trainer-{next(self._names)}"
        self.handle = await self._spawn(self.name)

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method of the trainer.

        Raises what the method raises; TrainerLost when the trainer dies, or is ended because the deadline passed.
        """
        handle = self.check()
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return await handle.call(method, *args)
        except WorkerDied as error:
            await self.lost(handle.name, str(error))
            raise TrainerLost(self._reason) from error  # whoever ended it has said why
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"{handle.name} did not answer {method!r} within {deadline_s:g} s and was ended"
            await self.lost(handle.name, reason)
            raise TrainerLost(reason) from None

    def check(self) -> Handle:
        """Return the trainer; TrainerLost when it is gone."""
        if self.handle is None:
            raise TrainerLost(self._reason)
        return self.handle

    async def lost(self, name: str, reason: str) -> bool:
        """Clear the seat; return whether it was still taken by this trainer."""
        if self.handle is None or self.handle.name != name:
            return False
        handle, self.handle = self.handle, None
        self._reason = reason
        await handle.kill()
        return True
