"""An engine's process: the plugins' announcement first, the engine's library second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from areal.contracts.component import OFFLOAD, Component, import_object
from areal.contracts.engine import Ends, Engine, Offloads, PauseMode, ReportsLoad
from areal.contracts.messages import Completion, GenerateRequest
from areal.contracts.specs import EngineContext
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.errors import PluginError
from areal.flow.engine.recall import Recall


class EngineWorker:
    """Invariant: `prepare` ran in this process before the engine's module was imported."""

    def __init__(
        self, component: Component, options: Any, context: EngineContext, prepare: str, blocked: Sequence[str]
    ) -> None:
        # The composition root names the function that announces the process to plugins; flow knows no plugins.
        import_object(prepare)(component.name, blocked)
        self._name = component.name
        self._engine: Engine = component.load()(options, context)
        self._recall = Recall(self._engine.generate)

    async def start(self) -> Layout:
        return await self._engine.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._recall.generate(request)

    async def knows(self, request: GenerateRequest) -> bool:
        """Return whether an earlier caller's same request is, or was lately, answered here."""
        return self._recall.knows(request)

    async def recall(self, request: GenerateRequest) -> Completion | None:
        """Return the answer to an earlier caller's same request, once it is there; None when it is gone."""
        return await self._recall.recall(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def offload(self) -> None:
        await self._offloading().offload()

    async def onload(self) -> None:
        await self._offloading().onload()

    def _offloading(self) -> Offloads:
        if not isinstance(self._engine, Offloads):
            raise PluginError(f"the engine {self._name!r} declares {OFFLOAD!r} and has no methods offload and onload")
        return self._engine

    async def receive(self, transfer: Transfer) -> Receipt:
        return await self._engine.receive(transfer)

    async def load(self) -> dict[str, float]:
        """Return how busy the engine is; empty for one that does not tell. Figures that are no numbers are an error."""
        load = self._engine.load() if isinstance(self._engine, ReportsLoad) else {}
        return {name: float(value) for name, value in load.items()} | {
            "recalled_total": float(self._recall.num_recalled)
        }

    async def ended(self) -> str:
        """Return why, once the engine can serve no more by itself; never return for one that does not say."""
        if isinstance(self._engine, Ends):
            return await self._engine.ended()
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._engine.close()
