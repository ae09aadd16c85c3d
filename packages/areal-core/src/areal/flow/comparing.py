"""Whether engines and trainer are the same policy: both are asked about the same tokens under the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from areal.flow.publishing import Publishing
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.evaluate import some_prompts
from areal.flow.sharing import OwnDevices
from areal.flow.tasks import TaskSet
from areal.flow.trainer.parity import Bounds
from areal.flow.trainer.seat import TrainerSeat

PARITY_TOKENS = 32
"""Tokens of each completion on which engines and trainer are compared."""
LOOK_S = 1.0
"""Between two looks at whether somebody new must be given weights before it can answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySettings:
    """Invariant: 0 prompts compare nothing."""

    prompts: int
    """Prompts on which engines and trainer are compared; 0: never."""
    every: int
    """Steps between comparisons; 0: only before the first step."""
    bounds: Bounds
    answer_s: float
    """Longest wait for the engines' answers."""
    deadline_s: float
    """Longest time for the trainer's part."""


class Comparing:
    """Invariant: what is compared was computed under the weights of one step."""

    def __init__(
        self,
        settings: ParitySettings,
        *,
        trainer: TrainerSeat,
        crew: Crew,
        publishing: Publishing,
        sharing: OwnDevices,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._crew = crew
        self._publishing = publishing
        self._sharing = sharing
        self.last_step = 0
        """That of the last comparison, or of the start."""
        self.metrics: Mapping[str, float] = {}
        """Of the last comparison."""

    def is_due(self, step: int) -> bool:
        return 0 < self._settings.every <= step - self.last_step

    async def measure(self, tasks: TaskSet, step: int) -> str:
        """Compare engines and trainer on a few prompts; return what is wrong with them, or an empty string.

        Waits until both have the same weights, and for a short answer to each prompt, which comes before all else.
        """
        self.last_step = step
        draws = some_prompts(self._crew.num_prompts, "train", self._settings.prompts)
        if not draws:
            return ""
        await self._publishing.settled(tasks, step)
        probing = tasks.start(self._crew.probe(draws, PARITY_TOKENS, self._settings.answer_s))
        while not (await asyncio.wait([probing], timeout=LOOK_S))[0]:
            # The engine that was asked may have died; its successor waits for these weights.
            await self._publishing.bring_up(tasks, step)
        async with self._sharing.trainers_turn():
            found: dict[str, float] = await self._trainer.call(
                "parity", probing.result(), deadline_s=self._settings.deadline_s
            )
        self.metrics = found
        return self._settings.bounds.broken_by(found)
