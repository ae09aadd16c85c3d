"""How much memory a group holds, estimated from its lengths: asking every object would cost too much."""

from __future__ import annotations

from areal.contracts.messages import Prompt, Trajectory

POINTER = 8
INTEGER = 28
FLOAT = 24
PROMPT_TOKEN = POINTER + INTEGER
SAMPLED_TOKEN = (POINTER + INTEGER) + (POINTER + FLOAT) + POINTER
"""Id, logprob and version: small whole numbers, as versions are, are the same objects everywhere."""
TURN = 430
"""A completion with its tuples, empty."""
TRAJECTORY = 400
"""With its outcome."""
PROMPT = 400
MESSAGE = 300


def prompt_bytes(prompt: Prompt) -> int:
    """Return the bytes of a prompt, its metadata left out."""
    texts = (text for message in prompt.messages for text in message.values())
    return PROMPT + MESSAGE * len(prompt.messages) + sum(map(len, texts)) + len(prompt.answer)


def trajectory_bytes(trajectory: Trajectory) -> int:
    """Return the bytes of a trajectory that came from another process, where nothing of it is shared."""
    size = TRAJECTORY + len(trajectory.outcome.detail)
    for turn in trajectory.turns:
        size += TURN + PROMPT_TOKEN * len(turn.prompt_ids) + SAMPLED_TOKEN * len(turn.token_ids)
    return size
