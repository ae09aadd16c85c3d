"""The tiny task with its reward computed in a child process, which a benchmark can kill."""

from __future__ import annotations

import asyncio
import random

from areal.builtins.tasks.reverse_digits import ReverseDigits, ReverseDigitsOptions
from areal.builtins.tasks.reverse_digits import score as reward_of
from areal.builtins.tasks.scoring import Scorer
from areal.contracts.environment import Client, Reply
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext

TIMEOUT_S = 60.0
"""For one call, on a machine where everything restarts at once."""

TOOL_S = 0.3


class ScoredDigits(ReverseDigits):
    """Digits to reverse, scored elsewhere. Invariant: prompts and rewards are those of `ReverseDigits`."""

    def __init__(self, options: Options, context: EnvironmentContext) -> None:
        super().__init__(ReverseDigitsOptions(), context)
        self._scorer = Scorer("measuring.scored:score", TIMEOUT_S)

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        return await self.score(await client.chat(prompt.messages), prompt)

    async def score(self, reply: Reply, prompt: Prompt) -> Outcome:
        return await self._scorer.score(text=reply.text, answer=prompt.answer, finished=reply.finished)


class SlowDigits(ScoredDigits):
    """As an agent that uses tools, which take their time. Invariant: prompts and rewards are those of `ReverseDigits`.

    So that whoever is killed had work in hand.
    """

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        await asyncio.sleep(random.uniform(0, TOOL_S))
        reply = await client.chat(prompt.messages)
        await asyncio.sleep(random.uniform(0, TOOL_S))
        return await self.score(reply, prompt)


def score(text: str, answer: str, finished: bool) -> dict[str, float]:
    """Called in the child."""
    outcome = reward_of(text, answer, finished=finished)
    assert outcome.reward is not None
    return {"reward": outcome.reward, **outcome.metrics}
