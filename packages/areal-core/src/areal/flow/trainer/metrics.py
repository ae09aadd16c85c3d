"""What a batch of groups looked like, for the step's report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from areal.contracts.messages import Group


def summarise(groups: Sequence[Group]) -> Mapping[str, float]:
    """Return what a batch of groups looked like: rewards, outcomes, lengths, the environments' own numbers."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    outcomes = [trajectory.outcome for trajectory in trajectories]
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    metrics: dict[str, float] = {
        "rollout/trajectories": float(len(trajectories)),
        "rollout/errors": float(sum(outcome.status == "error" for outcome in outcomes)),
        "rollout/timeouts": float(sum(outcome.status == "timeout" for outcome in outcomes)),
        "rollout/tokens": float(sum(trajectory.num_tokens for trajectory in trajectories)),
    }
    if rewards:
        metrics["reward/mean"] = sum(rewards) / len(rewards)
        metrics["reward/min"], metrics["reward/max"] = min(rewards), max(rewards)
    own: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            own[name].append(float(value))
    return metrics | {f"task/{name}": sum(values) / len(values) for name, values in own.items()}
