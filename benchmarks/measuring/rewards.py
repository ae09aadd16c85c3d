"""The rewards of the benchmark tasks. Standard library only: both sides of a comparison score with these lines."""

from __future__ import annotations

import re

COUNT_TO = 40
"""SmolLM2 needs about 150 tokens to count so far."""


def addition(text: str, answer: str, finished: bool) -> float:
    """Return 0.8 for the right last number, and 0.2 for an ended answer that is nothing but a number."""
    plain = finished and re.fullmatch(r"\s*-?\d+\.?\s*", text) is not None
    return 0.8 * (_last_number(text) == answer) + 0.2 * plain


def shown_addition(text: str, answer: str, finished: bool) -> float:
    """Return 1 for the right last number of an ended answer."""
    return float(finished and _last_number(text) == answer)


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


def _last_number(text: str) -> str:
    return next(iter(re.findall(r"-?\d+", text)[::-1]), "")


REWARDS = {"addition": addition, "shown_addition": shown_addition, "counting": counting, "reversing": reversing}
"""By the name of the environment that a prompt belongs to."""
