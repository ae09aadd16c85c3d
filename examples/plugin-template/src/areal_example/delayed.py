"""An engine around another one: it waits before each answer, and counts the requests."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field, NonNegativeFloat

from areal.contracts.component import Component
from areal.contracts.engine import Engine, PauseMode, ReportsLoad
from areal.contracts.messages import Completion, GenerateRequest
from areal.contracts.options import Options
from areal.contracts.specs import EngineContext
from areal.contracts.transfer import Layout, Receipt, Transfer


class DelayedEngineOptions(Options):
    """Invariant: only the delay is ours; `inner` is validated by the wrapped engine's own class."""

    delay_s: NonNegativeFloat = 0.0
    """Seconds that each request waits before the wrapped engine sees it."""
    wraps: str = "areal.builtins.transformers_engine.engine:TransformersEngine"
    """The wrapped engine, ``package.module:Class``."""
    wraps_options: str = "areal.builtins.transformers_engine.options:TransformersEngineOptions"
    """Its options class."""
    inner: dict[str, Any] = Field(default_factory=dict)
    """Its options."""


class DelayedEngine:
    """Invariant: tokens, logprobs and versions are the wrapped engine's."""

    def __init__(self, options: DelayedEngineOptions, context: EngineContext) -> None:
        wrapped = Component(name="wrapped", factory=options.wraps, options=options.wraps_options)
        self._inner: Engine = wrapped.load()(wrapped.parse_options(options.inner), context)
        self._delay_s = options.delay_s
        self._num_requests = 0

    async def start(self) -> Layout:
        return await self._inner.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        self._num_requests += 1
        await asyncio.sleep(self._delay_s)
        return await self._inner.generate(request)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._inner.pause(mode)

    async def resume(self) -> None:
        await self._inner.resume()

    async def receive(self, transfer: Transfer) -> Receipt:
        return await self._inner.receive(transfer)

    def load(self) -> dict[str, float]:
        inner = self._inner.load() if isinstance(self._inner, ReportsLoad) else {}
        return {**inner, "requests_total": float(self._num_requests)}

    async def close(self) -> None:
        await self._inner.close()
