"""Small values of what travels between the stages, and workers that are plain objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from areal.cluster.inline import InlineHandle
from areal.contracts.messages import Completion, FinishReason, Group, Outcome, Prompt, Trajectory


def make_prompt(index: int = 0, environment: str = "digits") -> Prompt:
    return Prompt(environment=environment, index=index, messages=({"role": "user", "content": f"task {index}"},))


def make_turn(
    prompt_ids: Sequence[int], token_ids: Sequence[int], version: int = 0, reason: FinishReason = "stop"
) -> Completion:
    return Completion(
        uid="0/0/0",
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        logprobs=tuple(-0.25 * (position + 1) for position in range(len(token_ids))),
        versions=(version,) * len(token_ids),
        finish_reason=reason,
    )


def make_trajectory(
    group: int, sample: int, *, version: int = 0, reward: float = 1.0, turns: Sequence[Completion] | None = None
) -> Trajectory:
    return Trajectory(
        group=group,
        sample=sample,
        turns=tuple(turns) if turns is not None else (make_turn((1, 2), (3, 4 + sample), version),),
        outcome=Outcome.scored(reward),
    )


def make_group(number: int, trajectories: Sequence[Trajectory]) -> Group:
    return Group(number=number, prompt=make_prompt(number), trajectories=tuple(trajectories))


def handle_of(name: str, worker: Any) -> InlineHandle:
    """Return a handle whose worker is an object of this process."""
    return InlineHandle(name, worker, lambda death: None)


async def until(condition: Callable[[], object]) -> None:
    """Let the others run until the condition holds; TimeoutError when it does not within some seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- nothing announces what tests look for
            await asyncio.sleep(0.001)
