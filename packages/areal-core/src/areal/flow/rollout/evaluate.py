"""Evaluation: test prompts, greedy, through the same workers and engines, beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from areal.contracts.environment import Split
from areal.contracts.messages import Group, Prompt, Trajectory
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.worker import GroupRequest


def some_prompts(num_prompts: Mapping[str, Mapping[str, int]], split: Split, wanted: int) -> list[tuple[str, int]]:
    """Return (environment, index) of at most `wanted` prompts of a split, spread evenly over the environments."""
    draws = [(index, name) for name, splits in num_prompts.items() for index in range(min(splits[split], wanted))]
    return [(name, index) for index, name in sorted(draws)[:wanted]]


async def evaluate(crew: Crew, prompts: Sequence[tuple[str, int]]) -> list[Group]:
    """Play each prompt once, greedily; return the groups. Engines may change weights meanwhile, and go on."""
    groups = await asyncio.gather(
        *(_play(crew, -1 - number, name, index) for number, (name, index) in enumerate(prompts))
    )
    return [group for group in groups if group is not None]


async def _play(crew: Crew, number: int, environment: str, index: int) -> Group | None:
    request = GroupRequest(
        number=number, environment=environment, prompt_index=index, samples=(0,), split="test", greedy=True
    )
    prompt: Prompt | None = None
    trajectories: list[Trajectory] = []
    async for part in crew.run(request, lambda: () if trajectories else (0,)):
        if isinstance(part, Prompt):
            prompt = part
        else:
            trajectories.append(part)
    if prompt is None or not trajectories:
        return None
    return Group(number=number, prompt=prompt, trajectories=tuple(trajectories))
