"""Tasks of reasoning-gym."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from areal.builtins.tasks.reasoning_gym import ReasoningGym, ReasoningGymOptions
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, MissingLibrary
from areal.testing.environment import ScriptedClient

CONTEXT = EnvironmentContext(name="gym", seed=3)
ADDITION = {"task": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def make(**options: Any) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    return ReasoningGym(ReasoningGymOptions(**options), CONTEXT)


def test_questions_are_held_out_even_when_there_are_few():
    environment = make(**ADDITION, size=300, test_size=50)
    train, test = ({p.messages[0]["content"] for p in environment.prompts(split)} for split in ("train", "test"))
    assert len(train) > 100 and len(test) > 10 and not train & test


def test_a_task_with_one_question_still_gives_prompts():
    environment = make(
        task="chain_sum", config={**ADDITION["config"], "min_terms": 1, "max_terms": 1}, size=20, test_size=5
    )
    assert len(list(environment.prompts("train"))) == 20 and len(list(environment.prompts("test"))) == 5


async def test_the_extracted_answer_is_scored():
    environment = make(**ADDITION, extract="last_number", suffix=" Think.")
    prompt = environment.prompts("train")[0]
    assert prompt.messages[0]["content"].endswith(" = Think.")
    for text, reward in {f"It is {prompt.answer}.": 1.0, f"{prompt.answer} or 99": 0.0, "no idea": 0.0}.items():
        outcome = await environment.episode(prompt, ScriptedClient(text))
        assert (text, outcome.reward, outcome.metrics) == (text, reward, {"accuracy": reward})


async def test_tagged_answers_and_partial_scores():
    environment = make(task="spell_backward", extract="tag", tag="final")
    prompt = environment.prompts("test")[0]
    assert prompt.answer.startswith("<final>") and prompt.answer.endswith("</final>")
    assert (await environment.episode(prompt, ScriptedClient("so " + prompt.answer))).reward == 1.0
    assert (await environment.episode(prompt, ScriptedClient(prompt.answer[7:-8]))).reward == 0.0
    partial = await make(task="gsm_symbolic").episode(prompt, ScriptedClient("123456789"))
    assert partial.reward == pytest.approx(0.01) and partial.metrics == {"accuracy": 0.0}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"task": "chain_sums"}, r"no task 'chain_sums' among its \d+; did you mean 'chain_sum'\?"),
        ({"task": "zzz"}, "no task 'zzz'"),
        ({**ADDITION, "config": {"min_term": 2}}, r"no setting 'min_term'; did you mean 'min_terms'\?"),
        ({**ADDITION, "config": {"seed": 1}}, "must not set seed"),
        ({**ADDITION, "config": {"min_terms": 0}}, "refuses its config .*: min_terms must be positive"),
        ({**ADDITION, "config": {"min_terms": "two"}}, "refuses its config"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint) as refusal:
        make(**options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("options", [{}, {"task": "x", "size": 0}, {"task": "x", "extract": "first"}])
def test_options_outside_their_range_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="validation error"):
        ReasoningGymOptions(**options)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("areal.builtins.tasks.reasoning_gym.find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match=r"pip install 'areal-core\[tasks\]'"):
        ReasoningGym(ReasoningGymOptions(**ADDITION), CONTEXT)
