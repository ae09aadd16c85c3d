"""The rewards of the benchmark tasks. Standard library only: both sides of a comparison score with these lines."""

from __future__ import annotations

import re

COUNT_TO = 30
"""As far as 120 tokens of SmolLM2 reach when it counts."""


def addition(text: str, answer: str, finished: bool) -> float:
    """Return 0.8 for the right last number, and 0.2 for an ended answer that is nothing but a number."""
    numbers = re.findall(r"-?\d+", text)
    right = bool(numbers) and numbers[-1] == answer
    plain = finished and re.fullmatch(r"\s*-?\d+\.?\s*", text) is not None
    return 0.8 * right + 0.2 * plain


def counting(text: str, answer: str, finished: bool) -> float:
    """Return how far the reply counts 1, 2, 3, ... without a mistake, as a share of `COUNT_TO`."""
    reached = 0
    for number in re.findall(r"\d+", text):
        if int(number) != reached + 1:
            break
        reached += 1
    return min(reached, COUNT_TO) / COUNT_TO


def reversing(text: str, answer: str, finished: bool) -> float:
    """Return the reward of the bundled task `reverse_digits`: half for right positions, half for the exact answer."""
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return 0.5 * right / max(len(text), len(answer)) + 0.5 * float(finished and text == answer)


REWARDS = {"addition": addition, "counting": counting, "reversing": reversing}
"""By the name of the environment that a prompt belongs to."""
