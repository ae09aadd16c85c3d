"""The environment ``sim``: prompts of given lengths, answers as long as a distribution says, rewards from a seed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from pydantic import Field

from areal.builtins.tasks.prompts import LazyPrompts
from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SimEnvironmentOptions(Options):
    """Invariant: equal options and seed give equal prompts, and each prompt's n-th answer the same length."""

    num_prompts: int = Field(default=10_000, ge=1)
    """Length of the train split."""
    num_test_prompts: int = Field(default=256, ge=1)
    """Length of the test split."""
    prompt_chars: int = Field(default=200, ge=16)
    """Characters of each prompt: the tiny model's tokenizer makes one token of each."""
    shortest: int = Field(default=200, ge=1)
    """Tokens of the shortest answer."""
    spread: float = Field(default=10.0, ge=1)
    """The longest answer by the shortest; lengths in between are uniform on a logarithmic scale."""
    latency_s: float = Field(default=0.0, ge=0)
    """Seconds of the reward, after the answer."""


class SimEnvironment:
    """Asks for an answer of a drawn length and gives a drawn reward, 0 or 1.

    Invariant: the length depends on the seed, the prompt and how often this worker has played it before, the reward on
    the seed, the prompt and the answer; neither on time.
    A prompt's rate of success lies between 0.1 and 0.9, so that groups differ and have an advantage.
    """

    def __init__(self, options: SimEnvironmentOptions, context: EnvironmentContext) -> None:
        self._options = options
        self._context = context
        self._played: dict[tuple[Split, int], int] = {}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        size = self._options.num_prompts if split == "train" else self._options.num_test_prompts
        return LazyPrompts(size, lambda index: self._prompt(split, index))

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        options, key = self._options, (prompt.metadata["split"], prompt.index)
        nth = self._played[key] = self._played.get(key, -1) + 1
        length, _ = self._draw(*key, nth)
        reply = await client.chat(prompt.messages, max_new_tokens=round(options.shortest * options.spread**length))
        if options.latency_s:
            await asyncio.sleep(options.latency_s)
        said = reply.completion.token_ids
        rate, _ = self._draw(*key, "rate")
        _, luck = self._draw(*key, f"{len(said)}/{said[:2]}")
        return Outcome.scored(float(luck < 0.1 + 0.8 * rate))

    def _draw(self, split: Split, index: int, what: int | str) -> tuple[float, float]:
        """Return two numbers in [0, 1); a hash, because making a `random.Random` for each costs ten times as much."""
        text = f"{self._context.seed}/{self._context.name}/{split}/{index}/{what}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return tuple(int.from_bytes(half) / 2**64 for half in (digest[:8], digest[8:]))  # type: ignore[return-value]

    def _prompt(self, split: Split, index: int) -> Prompt:
        head = f"{split} {index}: "
        num_rounds = -(-self._options.prompt_chars // len(LETTERS))
        text = (head + num_rounds * LETTERS)[: self._options.prompt_chars]
        return Prompt(
            environment=self._context.name,
            index=index,
            messages=({"role": "user", "content": text},),
            metadata={"split": split},
        )
