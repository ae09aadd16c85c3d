"""A task: write the given digits in ascending order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext


class SortDigitsOptions(Options):
    """Invariant: equal options and seed give equal prompts."""

    digits: int = Field(default=4, ge=1, le=64)
    """Digits of each prompt."""
    num_prompts: int = Field(default=1000, ge=1)
    """Length of each split."""


class SortDigits:
    """Prompt ``3142=``, answer ``1234``.

    Invariant: numbers whose digit sum is a multiple of 7 are in the test split only, the others in the train split.
    """

    def __init__(self, options: SortDigitsOptions, context: EnvironmentContext) -> None:
        self._options = options
        self._context = context

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [self._prompt(split, index) for index in range(self._options.num_prompts)]

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        right = sum(a == b for a, b in zip(reply.text, prompt.answer, strict=False))
        # An answer that goes on after the right digits is not the right answer.
        share = right / max(len(reply.text), len(prompt.answer))
        return Outcome.scored(share, accuracy=float(reply.text == prompt.answer))

    def _prompt(self, split: Split, index: int) -> Prompt:
        # A text as seed gives the same digits in every process; hash() would not.
        rng = random.Random(f"{self._context.seed}/{split}/{index}")
        while True:
            digits = rng.choices("0123456789", k=self._options.digits)
            if (sum(map(int, digits)) % 7 == 0) == (split == "test"):
                break
        return Prompt(
            environment=self._context.name,
            index=index,
            messages=({"role": "user", "content": f"{''.join(digits)}="},),
            answer="".join(sorted(digits)),
        )
