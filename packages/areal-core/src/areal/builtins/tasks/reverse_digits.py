"""The first task a newcomer sees: write the given digits backwards."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from areal.builtins.tasks.prompts import LazyPrompts
from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext


class ReverseDigitsOptions(Options):
    """Invariant: equal options and seed give equal prompts."""

    digits: int = Field(default=4, ge=1, le=64)
    """Digits of each prompt."""
    num_prompts: int = Field(default=10_000, ge=1)
    """Length of the train split; drawn with replacement."""
    num_test_prompts: int = Field(default=256, ge=1)
    """Length of the test split; drawn with replacement."""


class ReverseDigits:
    """Prompt ``1234=``, answer ``4321`` and then the stop token.

    Invariant: numbers whose digit sum ends in 0 are only in the test split, all others only in the train split.
    """

    def __init__(self, options: ReverseDigitsOptions, context: EnvironmentContext) -> None:
        self._options = options
        self._context = context

    def prompts(self, split: Split) -> Sequence[Prompt]:
        options = self._options
        size = options.num_prompts if split == "train" else options.num_test_prompts
        return LazyPrompts(size, lambda index: self._prompt(split, index))

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        return score(reply.text, prompt.answer, finished=reply.finished)

    def _prompt(self, split: Split, index: int) -> Prompt:
        rng = random.Random(f"{self._context.seed}/{split}/{index}")
        while True:
            digits = rng.choices("0123456789", k=self._options.digits)
            if (sum(map(int, digits)) % 10 == 0) == (split == "test"):
                break
        question = "".join(digits)
        return Prompt(
            environment=self._context.name,
            index=index,
            messages=({"role": "user", "content": f"{question}="},),
            answer=question[::-1],
        )


def score(text: str, answer: str, *, finished: bool) -> Outcome:
    """Reward half for the share of right positions, half for the exact answer ended by the model itself; 0..1."""
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    exact = float(finished and text == answer)
    return Outcome.scored(0.5 * right / max(len(text), len(answer)) + 0.5 * exact, accuracy=exact)
