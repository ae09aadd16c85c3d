"""Scoring with reasoning-gym's own scorers, some of which evaluate the answer; imported only by a scorer's process."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import create_dataset


def score(task: str, config: dict[str, Any], item: int, answer: str | None) -> dict[str, float]:
    """Return the task's own score (0..1) of `answer` to number `item`; raises what the task raises."""
    dataset, entry = _entry(task, json.dumps(config), item)
    reward = float(dataset.score_answer(answer=answer, entry=entry))
    return {"reward": reward, "accuracy": float(reward >= 1.0)}


@lru_cache(maxsize=1024)  # the samples of one group ask for the same item
def _entry(task: str, config: str, item: int) -> tuple[Any, dict[str, Any]]:
    dataset = _dataset(task, config)
    return dataset, dataset[item]


@lru_cache(maxsize=8)
def _dataset(task: str, config: str) -> Any:
    return create_dataset(task, **json.loads(config))
