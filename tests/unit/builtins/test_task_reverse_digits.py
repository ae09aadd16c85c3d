"""The bundled first task."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal.builtins.tasks.reverse_digits import ReverseDigits, ReverseDigitsOptions, score
from areal.contracts.specs import EnvironmentContext
from areal.testing.environment import ScriptedClient

CONTEXT = EnvironmentContext(name="reverse", seed=5)


def make(**options: int) -> ReverseDigits:
    return ReverseDigits(ReverseDigitsOptions(**options), CONTEXT)


def test_a_prompt_asks_for_its_digits_backwards():
    for prompt in make(digits=6).prompts("train")[:50]:
        [message] = prompt.messages
        question = message["content"]
        assert message["role"] == "user" and question.endswith("=") and len(question) == 7
        assert prompt.answer == question[5::-1]


def test_splits_differ_in_the_digit_sum():
    environment = make(num_prompts=500, num_test_prompts=100)
    assert len(environment.prompts("train")) == 500 and len(environment.prompts("test")) == 100
    assert all(sum(map(int, p.answer)) % 10 for p in environment.prompts("train"))
    assert all(sum(map(int, p.answer)) % 10 == 0 for p in environment.prompts("test"))


def test_another_seed_gives_other_prompts():
    other = ReverseDigits(ReverseDigitsOptions(), EnvironmentContext(name="reverse", seed=6))
    assert [p.answer for p in make().prompts("train")[:9]] != [p.answer for p in other.prompts("train")[:9]]


@pytest.mark.parametrize(
    ("text", "finished", "reward", "accuracy"),
    [
        ("4321", True, 1.0, 1.0),
        ("4321", False, 0.5, 0.0),
        ("4329", True, 0.375, 0.0),
        ("432", True, 0.375, 0.0),
        ("43210", True, 0.4, 0.0),
        ("1234", True, 0.0, 0.0),
        ("", True, 0.0, 0.0),
    ],
)
def test_reward(text: str, finished: bool, reward: float, accuracy: float):
    outcome = score(text, "4321", finished=finished)
    assert outcome.reward == pytest.approx(reward)
    assert outcome.metrics == {"accuracy": accuracy}


@given(st.text(max_size=12), st.text("0123456789", min_size=1, max_size=8), st.booleans())
def test_only_the_finished_answer_earns_everything(text: str, answer: str, finished: bool):
    reward = score(text, answer, finished=finished).reward
    assert reward is not None and 0 <= reward <= 1
    assert (reward == 1) == (finished and text == answer)


async def test_an_episode_costs_little():
    environment = make()
    prompt, client = environment.prompts("train")[0], ScriptedClient("1234")
    started = time.process_time()
    for _ in range(200):
        await environment.episode(prompt, client)
    # A run plays thousands a second; 1 ms each would already be far too slow.
    assert (time.process_time() - started) / 200 < 1e-3


@pytest.mark.parametrize("options", [{"digits": 0}, {"digits": 65}, {"num_prompts": 0}, {"digit": 4}])
def test_bad_options_are_refused(options: dict[str, int]):
    with pytest.raises(ValidationError):
        ReverseDigitsOptions(**options)
