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

from areal.contracts.messages import Completion, Outcome, Prompt, Trajectory
from areal.errors import JournalError
from areal.flow.buffer.codec import decode_prompt, decode_trajectory, encode_prompt, encode_trajectory

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
    again = decode_trajectory(trajectory.group, trajectory.sample, encode_trajectory(trajectory))
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
    (again,) = decode_trajectory(0, 0, encode_trajectory(make_trajectory(0, 0, turns=[turn]))).turns
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


def test_the_text_is_readable_json() -> None:
    text = encode_trajectory(make_trajectory(3, 1, turns=[make_turn((1,), (2, 3), version=4)]))
    (turn,) = json.loads(text)["turns"]
    assert turn["token_ids"] == [2, 3] and turn["versions"] == [4, 4]
    assert text.isascii()
