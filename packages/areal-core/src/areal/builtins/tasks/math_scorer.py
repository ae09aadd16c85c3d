"""Comparing answers with math-verify; imported only by a scorer's process, because it loads sympy."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from areal.builtins.tasks.answers import after_mark, in_tag


def score(text: str, reference: str) -> dict[str, float]:
    """Return reward 1 when the reply's final answer equals `reference`, else 0; raises what math-verify raises."""
    gold = _parse(reference)
    if not gold:
        raise ValueError(f"math-verify finds no number in the reference answer {reference!r}")
    # math-verify finds nothing inside tags, so their content is taken out first.
    answer = after_mark(text) or in_tag(text, "answer") or text
    right = float(verify(gold, _parse(answer), timeout_seconds=None, raise_on_error=True))
    return {"reward": right, "accuracy": right}


def _parse(text: str) -> list[Any]:
    # Its own time limits use SIGALRM and work in main threads only; the scorer's deadline does the job.
    return parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]


_parse("1")  # its grammars load at the first use, which must not count against an answer's deadline
