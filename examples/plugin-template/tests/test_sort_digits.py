"""The environment keeps its contract, and rewards what it should."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from areal.contracts.component import Component
from areal.contracts.environment import Reply
from areal.contracts.messages import Completion, Outcome
from areal.contracts.specs import EnvironmentContext
from areal.testing.environment import EnvironmentConformance
from areal_example.hooks import areal_environments
from areal_example.sort_digits import SortDigits, SortDigitsOptions


class TestContract(EnvironmentConformance):
    @pytest.fixture
    def component(self) -> Component:
        return areal_environments()[0]


class Says:
    """A client whose model always says the same. Invariant: no engine is needed."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def chat(self, messages: Sequence[Mapping[str, str]], *, max_new_tokens: int | None = None) -> Reply:
        completion = Completion(
            uid="", prompt_ids=(1,), token_ids=(2,), logprobs=(0.0,), versions=(0,), finish_reason="stop"
        )
        return Reply(text=self._text, completion=completion)


def play(text: str, digits: int = 4) -> tuple[str, Outcome]:
    """Return the right answer and the outcome when the model says ``text`` with ANSWER replaced by it."""
    environment = SortDigits(SortDigitsOptions(digits=digits), EnvironmentContext(name="sort", seed=3))
    prompt = environment.prompts("train")[0]
    said = text.replace("ANSWER", prompt.answer)
    return prompt.answer, asyncio.run(environment.episode(prompt, Says(said)))


def test_the_answer_is_the_sorted_question() -> None:
    environment = SortDigits(SortDigitsOptions(digits=6), EnvironmentContext(name="sort", seed=3))
    for prompt in environment.prompts("train")[:20]:
        question = prompt.messages[0]["content"]
        assert question.endswith("=") and len(question) == 7
        assert prompt.answer == "".join(sorted(question[:-1]))


def test_only_the_whole_answer_is_worth_one() -> None:
    answer, outcome = play("ANSWER")
    assert (outcome.reward, outcome.metrics["accuracy"]) == (1.0, 1.0)
    assert answer == "".join(sorted(answer))


@pytest.mark.parametrize(("said", "reward"), [("", 0.0), ("x", 0.0), ("ANSWERANSWER", 0.5)])
def test_less_is_worth_less(said: str, reward: float) -> None:
    _, outcome = play(said)
    assert (outcome.status, outcome.reward, outcome.metrics["accuracy"]) == ("ok", reward, 0.0)
