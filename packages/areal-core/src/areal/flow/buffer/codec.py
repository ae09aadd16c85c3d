"""Trajectories as JSON: readable with any SQLite shell, and floats come back bit for bit (repr round-trips)."""

from __future__ import annotations

import json
from typing import Any

from areal.contracts.messages import Completion, Outcome, Prompt, Trajectory
from areal.errors import JournalError

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
"""What reading something else than was written may raise."""


def encode_prompt(prompt: Prompt) -> str:
    """Return the prompt as JSON; JournalError when its environment put in it what JSON cannot hold."""
    fields = {
        "environment": prompt.environment,
        "index": prompt.index,
        "messages": [dict(message) for message in prompt.messages],
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
    }
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise JournalError(
            f"prompt {prompt.index} of environment {prompt.environment!r} cannot be journalled: {error}; "
            "'metadata' may hold JSON values only"
        ) from error


def decode_prompt(text: str) -> Prompt:
    """Return the prompt; JournalError when the text is damaged."""
    try:
        fields: dict[str, Any] = json.loads(text)
        fields["messages"] = tuple(fields["messages"])
        return Prompt(**fields)
    except _DAMAGE as error:
        raise JournalError(f"a prompt in the journal is damaged ({error}): {text:.60}") from error


def encode_trajectory(trajectory: Trajectory) -> str:
    outcome = trajectory.outcome
    return json.dumps(
        {
            "turns": [
                {
                    "uid": turn.uid,
                    "prompt_ids": turn.prompt_ids,
                    "token_ids": turn.token_ids,
                    "logprobs": turn.logprobs,
                    "versions": turn.versions,
                    "finish_reason": turn.finish_reason,
                }
                for turn in trajectory.turns
            ],
            "outcome": {
                "status": outcome.status,
                "reward": outcome.reward,
                "detail": outcome.detail,
                "metrics": dict(outcome.metrics),
            },
        }
    )


def decode_trajectory(group: int, sample: int, text: str) -> Trajectory:
    """Return the trajectory; JournalError when the text is damaged."""
    try:
        fields: dict[str, Any] = json.loads(text)
        turns = tuple(_decode_turn(turn) for turn in fields["turns"])
        return Trajectory(group=group, sample=sample, turns=turns, outcome=Outcome(**fields["outcome"]))
    except _DAMAGE as error:
        raise JournalError(
            f"trajectory {group}/{sample} in the journal is damaged ({error}); to have it made anew, delete its row "
            f"from the table trajectories: group_number {group}, sample {sample}"
        ) from error


def _decode_turn(fields: dict[str, Any]) -> Completion:
    for name in ("prompt_ids", "token_ids", "logprobs", "versions"):
        fields[name] = tuple(fields[name])
    return Completion(**fields)
