"""The benchmark tasks as environments of `areal run`, found there by dotted path."""

from __future__ import annotations

import random
from collections.abc import Sequence

from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext
from measuring import rewards

NUM_PROMPTS = {"train": 1000, "test": 64}


class Addition:
    """Two digits to add; short answers. Invariant: equal seeds give equal prompts."""

    def __init__(self, options: Options, context: EnvironmentContext) -> None:
        self._context = context

    def prompts(self, split: Split) -> Sequence[Prompt]:
        rng = random.Random(f"{self._context.seed}/{split}")
        return [self._prompt(index, rng.randint(0, 9), rng.randint(0, 9)) for index in range(NUM_PROMPTS[split])]

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        return Outcome.scored(rewards.addition(reply.text, prompt.answer, reply.finished))

    def _prompt(self, index: int, a: int, b: int) -> Prompt:
        question = f"What is {a} + {b}? Answer with only the number."
        return Prompt(
            environment=self._context.name,
            index=index,
            messages=({"role": "user", "content": question},),
            answer=str(a + b),
        )


class Counting:
    """Count upwards; answers as long as the limit lets them be. Invariant: there is one prompt."""

    def __init__(self, options: Options, context: EnvironmentContext) -> None:
        self._context = context

    def prompts(self, split: Split) -> Sequence[Prompt]:
        question = "Count from 1 to 40. Write all the numbers, separated by commas."
        return [
            Prompt(environment=self._context.name, index=index, messages=({"role": "user", "content": question},))
            for index in range(NUM_PROMPTS[split])
        ]

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        return Outcome.scored(rewards.counting(reply.text, prompt.answer, reply.finished))
