"""Trajectories through JSON and back: every bit of every number, every character of every text."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from flow_samples import make_prompt, make_trajectory, make_turn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measuring import journal_v1

from areal.contracts.messages import Completion, Outcome, Prompt, Trajectory
from areal.errors import JournalError
from areal.flow.buffer.codec import decode_prompt, decode_trajectory, encode_prompt, encode_trajectory, stripped

FLOATS = st.floats(allow_nan=False)  # infinities, denormals and both zeros included
TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates included: models produce half characters
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@st.composite
def turns(draw: st.DrawFn) -> Completion:
    size = draw(st.integers(0, 5))
    return Completion(
        uid=draw(TEXTS),
        prompt_ids=tuple(draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31), min_size=size, max_size=size))),
        logprobs=tuple(draw(st.lists(FLOATS, min_size=size, max_size=size))),
        versions=tuple(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))),
        finish_reason=draw(st.sampled_from(["stop", "length", "interrupted"])),
    )


OUTCOMES = st.one_of(
    st.builds(Outcome, status=st.just("ok"), reward=FLOATS, metrics=st.dictionaries(TEXTS, FLOATS, max_size=3)),
    st.builds(Outcome.error, TEXTS),
    st.builds(Outcome.timeout, TEXTS),
)
TRAJECTORIES = st.builds(
    Trajectory,
    group=st.integers(-5, 10**6),
    sample=st.integers(0, 64),
    turns=st.lists(turns(), max_size=3).map(tuple),
    outcome=OUTCOMES,
)


@given(TRAJECTORIES)
@example(make_trajectory(0, 0, reward=-0.0))
@settings(max_examples=100, deadline=None)
def test_a_trajectory_comes_back_bit_for_bit(trajectory: Trajectory) -> None:
    again = decode_trajectory(trajectory.group, trajectory.sample, *encode_trajectory(trajectory))
    assert again == trajectory
    for before, after in zip(trajectory.turns, again.turns, strict=True):
        assert [bits(value) for value in before.logprobs] == [bits(value) for value in after.logprobs]
        assert all(type(part) is tuple for part in (after.prompt_ids, after.token_ids, after.logprobs, after.versions))
    if trajectory.outcome.reward is not None:
        assert again.outcome.reward is not None
        assert bits(trajectory.outcome.reward) == bits(again.outcome.reward)


def test_numbers_at_the_edge() -> None:
    edge = (5e-324, 2.2250738585072014e-308, float("-inf"), -0.0, 0.1 + 0.2)
    turn = Completion(
        uid="u", prompt_ids=(1,), token_ids=(2,) * 5, logprobs=edge, versions=(0,) * 5, finish_reason="length"
    )
    (again,) = decode_trajectory(0, 0, *encode_trajectory(make_trajectory(0, 0, turns=[turn]))).turns
    assert [bits(value) for value in again.logprobs] == [bits(value) for value in edge]


@given(TEXTS, st.integers(0, 10**9), st.lists(TEXTS, min_size=1, max_size=3), TEXTS, st.dictionaries(TEXTS, JSON))
@settings(max_examples=60, deadline=None)
def test_a_prompt_comes_back(
    environment: str, index: int, contents: list[str], answer: str, metadata: dict[str, Any]
) -> None:
    prompt = Prompt(
        environment=environment,
        index=index,
        messages=tuple({"role": "user", "content": content} for content in contents),
        answer=answer,
        metadata=metadata,
    )
    assert decode_prompt(encode_prompt(prompt)) == prompt


def test_metadata_that_is_not_json() -> None:
    prompt = replace(make_prompt(7), metadata={"allowed": {1, 2}})
    with pytest.raises(JournalError, match=r"prompt 7 of environment 'digits' cannot be journalled: .* set is not"):
        encode_prompt(prompt)


def test_what_a_person_reads_is_json() -> None:
    body, tokens = encode_trajectory(make_trajectory(3, 1, turns=[make_turn((1,), (2, 3), version=4)]))
    (turn,) = json.loads(body)["turns"]
    assert turn["lengths"] == [0, 1, 2] and turn["versions"] == [[4, 2]] and turn["types"] == "HHf"
    assert body.isascii()
    assert struct.unpack("<HHHff", tokens[:-4]) == (1, 2, 3, -0.25, -0.5), "as docs/journal.md says"


def test_a_conversation_is_written_once() -> None:
    first = make_turn((1, 2), (3, 4))
    second = make_turn((1, 2, 3, 4, 70_000), (6,))
    other = make_turn((9, 2, 3), (8,))
    trajectory = make_trajectory(0, 0, turns=[first, second, other])
    body, tokens = encode_trajectory(trajectory)
    assert [turn["lengths"] for turn in json.loads(body)["turns"]] == [[0, 2, 2], [4, 1, 1], [0, 3, 1]]
    assert decode_trajectory(0, 0, body, tokens) == trajectory


@given(TRAJECTORIES)
@settings(max_examples=50, deadline=None)
def test_what_schema_1_wrote_is_read(trajectory: Trajectory) -> None:
    again = decode_trajectory(trajectory.group, trajectory.sample, journal_v1.encode(trajectory), None)
    assert again == trajectory
    assert all(type(part) is tuple for turn in again.turns for part in (turn.prompt_ids, turn.logprobs, turn.versions))


@given(TRAJECTORIES, st.data())
@settings(max_examples=100, deadline=None)
def test_no_changed_byte_goes_unnoticed(trajectory: Trajectory, data: st.DataObject) -> None:
    body, tokens = encode_trajectory(trajectory)
    raw = bytearray(body.encode() + tokens)
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    cut = len(body.encode())
    changed = bytes(raw[:cut]).decode("utf-8", "surrogateescape"), bytes(raw[cut:])
    with pytest.raises(JournalError, match=f"trajectory {trajectory.group}/{trajectory.sample} .* is damaged"):
        decode_trajectory(trajectory.group, trajectory.sample, *changed)
    with pytest.raises(JournalError, match="is damaged"):
        decode_trajectory(trajectory.group, trajectory.sample + 1, body, tokens)  # another row's
    with pytest.raises(JournalError, match="is damaged"):
        decode_trajectory(trajectory.group, trajectory.sample, body, tokens[: len(tokens) // 2])


@given(TRAJECTORIES)
@settings(max_examples=50, deadline=None)
def test_without_its_tokens_a_row_says_so(trajectory: Trajectory) -> None:
    body, _ = encode_trajectory(trajectory)
    old = journal_v1.encode(trajectory)
    short = stripped(old)
    if not trajectory.turns:
        assert short is None and decode_trajectory(trajectory.group, trajectory.sample, body, None) == trajectory
        return
    assert short is not None and stripped(short) is None and stripped(body) is None
    assert json.loads(short)["outcome"] == json.loads(old)["outcome"]
    for lost in (body, short):
        with pytest.raises(JournalError, match=r"has lost its tokens: the journal had grown to journal.max_mb"):
            decode_trajectory(trajectory.group, trajectory.sample, lost, None)
