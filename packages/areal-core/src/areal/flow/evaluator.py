"""Evaluation beside the circle: one at a time, and nobody waits for it but the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from areal.flow.buffer.journal import Journal
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.evaluate import evaluate, some_prompts
from areal.flow.tasks import TaskSet
from areal.flow.trainer.metrics import summarise


class Audience(Protocol):
    """Who hears of evaluations. Invariant: no call waits."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Evaluator:
    """Invariant: an evaluation begins with its step's weights and never overlaps with another one."""

    def __init__(self, crew: Crew, journal: Journal, audience: Audience, num_prompts: int) -> None:
        self._crew = crew
        self._journal = journal
        self._audience = audience
        self._num_prompts = num_prompts
        self._running: asyncio.Task[None] | None = None

    def begin(self, tasks: TaskSet, step: int, serving: Callable[[int], Awaitable[None]]) -> None:
        """Evaluate the weights of `step` once engines are `serving` them, unless an earlier evaluation still runs."""
        if self._running is None or self._running.done():
            self._running = tasks.start(self._evaluate(step, serving))

    async def finish(self) -> None:
        """Wait for the evaluation that runs; its episodes' deadlines end it."""
        if self._running is not None:
            await self._running

    def abandon(self) -> None:
        """Forget the evaluation that runs: its step is taken back."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _evaluate(self, step: int, serving: Callable[[int], Awaitable[None]]) -> None:
        await serving(step)  # the engines may still be reading this step's weights
        groups = await evaluate(self._crew, some_prompts(self._crew.num_prompts, "test", self._num_prompts))
        metrics = {f"eval/{name}": value for name, value in summarise(groups).items()}
        self._journal.evaluated(step, metrics)
        self._audience.evaluated(step, metrics)
