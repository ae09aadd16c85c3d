"""Small groups of sampled answers, for tests of what an algorithm makes of rewards."""

from __future__ import annotations

from collections.abc import Sequence

from areal.contracts.messages import Completion, Group, Outcome, Prompt, Trajectory


def sampled(reward: float | None, *lengths: int, group: int = 0, sample: int = 0) -> Trajectory:
    """Return a trajectory with one turn of so many tokens for each of `lengths`; without a reward it has failed."""
    turns = tuple(
        Completion(
            uid="",
            prompt_ids=(1,),
            token_ids=(5,) * length,
            logprobs=(-1.0,) * length,
            versions=(0,) * length,
            finish_reason="stop",
        )
        for length in lengths
    )
    outcome = Outcome.error("broken") if reward is None else Outcome.scored(reward)
    return Trajectory(group=group, sample=sample, turns=turns, outcome=outcome)


def group_of(trajectories: Sequence[Trajectory], number: int = 0) -> Group:
    """Return the trajectories as the group of one prompt."""
    prompt = Prompt(environment="e", index=number, messages=())
    return Group(number=number, prompt=prompt, trajectories=tuple(trajectories))
