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
Messages = tuple[dict[str, str], ...]


class Addition:
    """Two digits to add. Invariant: equal seeds give equal prompts."""

    def __init__(self, options: Options, context: EnvironmentContext) -> None:
        self._context = context

    def prompts(self, split: Split) -> Sequence[Prompt]:
        rng = random.Random(f"{self._context.seed}/{split}")
        drawn = [self.draw(rng) for _ in range(NUM_PROMPTS[split])]
        name = self._context.name
        return [
            Prompt(environment=name, index=index, messages=messages, answer=answer)
            for index, (messages, answer) in enumerate(drawn)
        ]

    def draw(self, rng: random.Random) -> tuple[Messages, str]:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        return ({"role": "user", "content": f"What is {a} + {b}? Answer with only the number."},), str(a + b)

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        reward = rewards.REWARDS[self._context.name]
        return Outcome.scored(reward(reply.text, prompt.answer, reply.finished))


class ShownAddition(Addition):
    """Additions with an example before them, so that answers are short. Invariant: as `Addition`'s."""

    def draw(self, rng: random.Random) -> tuple[Messages, str]:
        a, b = rng.randint(2, 19), rng.randint(2, 9)
        return conversation("13 + 5", "13 + 5 = 18", f"{a} + {b}"), str(a + b)


class Counting(Addition):
    """Count upwards, with an example; answers up to the limit. Invariant: there is one question."""

    def draw(self, rng: random.Random) -> tuple[Messages, str]:
        shown = ", ".join(map(str, range(1, 11)))
        question = f"Write the numbers from 1 to {rewards.COUNT_TO}."
        return conversation("Write the numbers from 1 to 10.", shown, question), ""


def conversation(question: str, answer: str, next_question: str) -> Messages:
    """Return an answered question and the next one; the empty system message keeps out the template's own."""
    turns = [("system", ""), ("user", question), ("assistant", answer), ("user", next_question)]
    return tuple({"role": role, "content": content} for role, content in turns)
