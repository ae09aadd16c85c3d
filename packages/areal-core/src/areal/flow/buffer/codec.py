"""Trajectories as rows: what a person reads as JSON, the tokens as packed numbers; every float comes back bit for bit.

`body` is JSON: the outcome and, for each turn, its uid, finish reason, lengths and versions as runs [version, length].
`tokens` holds the turns' arrays one after the other, little-endian: prompt ids, sampled ids, logprobs, each in the
narrowest type that loses nothing (`types`, as in Python's `array`), and at last a CRC-32 of all of it.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby, repeat
from typing import Any
from zlib import crc32

from areal.contracts.messages import Completion, Outcome, Prompt, Trajectory
from areal.errors import JournalError

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError, RecursionError)
"""What reading something else than was written may raise."""
_WHOLE, _REAL = "HIq", "fd"
"""Types of ids and of logprobs, narrowest first."""
_CRC_BYTES = 4
_ARRAYS = ("prompt_ids", "token_ids", "logprobs", "versions")
"""What schema 1 had in the JSON of a turn."""


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
        raise JournalError(f"a prompt in the journal is damaged ({error}): {text!r:.60}") from error


def encode_trajectory(trajectory: Trajectory) -> tuple[str, bytes]:
    """Return (body, tokens) of the trajectory's row."""
    outcome = trajectory.outcome
    arrays: list[array[Any]] = []
    turns: list[dict[str, Any]] = []
    before: tuple[int, ...] = ()
    for turn in trajectory.turns:
        # A conversation repeats all that was said; only what is new is written.
        known = len(before) if before and turn.prompt_ids[: len(before)] == before else 0
        parts = [_packed(turn.prompt_ids[known:]), _packed(turn.token_ids), _packed_exactly(turn.logprobs)]
        arrays += parts
        turns.append(
            {
                "uid": turn.uid,
                "finish_reason": turn.finish_reason,
                "lengths": [known, len(turn.prompt_ids) - known, len(turn.token_ids)],
                "types": "".join(part.typecode for part in parts),
                "versions": _runs(turn.versions),
            }
        )
        before = turn.prompt_ids + turn.token_ids
    body = json.dumps(
        {
            "turns": turns,
            "outcome": {
                "status": outcome.status,
                "reward": outcome.reward,
                "detail": outcome.detail,
                "metrics": dict(outcome.metrics),
            },
        }
    )
    numbers = b"".join(_little_endian(part).tobytes() for part in arrays)
    return body, numbers + _checksum(trajectory.group, trajectory.sample, body, numbers)


def decode_trajectory(group: int, sample: int, body: str, tokens: bytes | None) -> Trajectory:
    """Return the trajectory, of a row of schema 1 (`tokens` is None, the JSON has all) as well.

    Raises JournalError when the row is damaged or has lost its tokens to compaction.
    """
    try:
        fields: dict[str, Any] = json.loads(body)
        if tokens is not None:
            _check(group, sample, body, tokens)
            turns = _decode_turns(fields["turns"], tokens)
        elif is_without_tokens(fields):
            turns = None
        else:
            turns = tuple(_turn_of_schema_1(turn) for turn in fields["turns"])
        outcome = Outcome(**fields["outcome"])
    except _DAMAGE as error:
        raise JournalError(f"trajectory {group}/{sample} in the journal is damaged ({error})") from error
    if turns is None:
        raise JournalError(
            f"trajectory {group}/{sample} has lost its tokens: the journal had grown to journal.max_mb and no kept "
            "checkpoint could need them"
        )
    return Trajectory(group=group, sample=sample, turns=turns, outcome=outcome)


def is_without_tokens(fields: dict[str, Any]) -> bool:
    """Return whether a body whose row has no `tokens` has none in its JSON either."""
    return any("lengths" in turn for turn in fields["turns"])


def stripped(body: str) -> str | None:
    """Return the body of a row of schema 1 without its tokens; None when it has none, or is damaged."""
    try:
        fields: dict[str, Any] = json.loads(body)
        if not fields["turns"] or is_without_tokens(fields):
            return None
        for turn in fields["turns"]:
            prompt, sampled, _, versions = (turn.pop(name) for name in _ARRAYS)
            turn |= {"lengths": [0, len(prompt), len(sampled)], "versions": _runs(versions)}
    except _DAMAGE:
        return None
    return json.dumps(fields)


def _check(group: int, sample: int, body: str, tokens: bytes) -> None:
    numbers, found = tokens[:-_CRC_BYTES], tokens[-_CRC_BYTES:]
    if found != _checksum(group, sample, body, numbers):
        raise ValueError("its checksum does not match")


def _checksum(group: int, sample: int, body: str, numbers: bytes) -> bytes:
    return crc32(f"{group}/{sample}{body}".encode(), crc32(numbers)).to_bytes(_CRC_BYTES, "little")


def _decode_turns(turns: Sequence[dict[str, Any]], tokens: bytes) -> tuple[Completion, ...]:
    offset = 0

    def take(code: str, length: int) -> tuple[Any, ...]:
        nonlocal offset
        part: array[Any] = array(code)
        end = offset + length * part.itemsize
        part.frombytes(tokens[offset:end])
        offset = end
        return tuple(_little_endian(part))

    decoded: list[Completion] = []
    before: tuple[int, ...] = ()
    for turn in turns:
        known, num_new, num_sampled = turn["lengths"]
        of_prompt, of_sampled, of_logprobs = turn["types"]
        prompt_ids = before[:known] + take(of_prompt, num_new)
        completion = Completion(
            uid=turn["uid"],
            prompt_ids=prompt_ids,
            token_ids=take(of_sampled, num_sampled),
            logprobs=take(of_logprobs, num_sampled),
            versions=tuple(chain.from_iterable(repeat(version, length) for version, length in turn["versions"])),
            finish_reason=turn["finish_reason"],
        )
        decoded.append(completion)
        before = prompt_ids + completion.token_ids
    return tuple(decoded)


def _turn_of_schema_1(fields: dict[str, Any]) -> Completion:
    completion = Completion(**fields)
    return replace(completion, **{name: tuple(fields[name]) for name in _ARRAYS})


def _packed(ids: Sequence[int]) -> array[int]:
    for code in _WHOLE[:-1]:
        try:
            return array(code, ids)
        except OverflowError:
            continue
    return array(_WHOLE[-1], ids)


def _packed_exactly(numbers: tuple[float, ...]) -> array[float]:
    """Return the numbers in single precision if each is one, as engines' logprobs are, else in double."""
    single = array(_REAL[0], numbers)
    return single if tuple(single) == numbers else array(_REAL[1], numbers)


def _runs(versions: Sequence[int]) -> list[list[int]]:
    if versions and versions.count(versions[0]) == len(versions):
        return [[versions[0], len(versions)]]
    return [[version, len(list(run))] for version, run in groupby(versions)]


def _little_endian(part: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        part.byteswap()
    return part
