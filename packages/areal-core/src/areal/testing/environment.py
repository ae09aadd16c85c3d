"""The conformance kit of environments.

    class TestMine(EnvironmentConformance):
        @pytest.fixture
        def component(self) -> Component:
            return Component(name="mine", factory="my_package.mine:Mine")

A scripted client plays the model, so no engine is needed. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import pytest

from areal.contracts.component import Component
from areal.contracts.environment import Environment, Reply, Split
from areal.contracts.messages import Completion, FinishReason, Outcome, Prompt
from areal.contracts.specs import EnvironmentContext

EnvironmentFactory = Callable[[EnvironmentContext], Environment]

CONTEXT = EnvironmentContext(name="under_test", seed=11)
SPLITS: tuple[Split, Split] = ("train", "test")
# Prompts looked at from each end of a split; splits may be long, and making a prompt may be slow.
NUM_ENDS = 8
NUM_REFERENCES = 3
EPISODE_DEADLINE_S = 180.0
PROCESS_DEADLINE_S = 180.0
# More turns than any bundled or imaginable scripted episode needs: an episode beyond them does not end by itself.
MAX_TURNS = 1000

ODD_TEXTS = {
    "empty": "",
    "blank": " \n\t ",
    "prose": "I would rather talk about the weather.",
    "number": "-12345678901234567890",
    "unbalanced": "((([[[{{{ \\frac{1}{ <answer> ``` ####",
    "unicode": "\u0663\u00bd\u2603 \U0001f600 \x00 \ud800",
    "long": "9 = 9 #### 9\n" * 2000,
}
"""Answers that no task expects, by kind."""

FINGERPRINT = """
import pickle, sys
from areal.testing.environment import fingerprint
component, options, context = pickle.loads(bytes.fromhex(sys.argv[1]))
print(fingerprint(component.load()(component.parse_options(options), context)))
"""


class ScriptedClient:
    """A model that says the given texts, the last one again and again. Invariant: asking never fails or waits."""

    def __init__(self, *texts: str, finish_reason: FinishReason = "stop") -> None:
        self.calls = 0
        self._texts: Iterator[str] = itertools.chain(texts, itertools.repeat(texts[-1]))
        self._finish_reason: FinishReason = finish_reason

    async def chat(self, messages: Sequence[Mapping[str, str]], *, max_new_tokens: int | None = None) -> Reply:
        assert all(isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages)
        self.calls += 1
        assert self.calls <= MAX_TURNS, f"the episode did not end within {MAX_TURNS} turns"
        text = next(self._texts)
        # One token for each character; at least one, as an engine would give.
        token_ids = tuple(ord(character) for character in text) or (0,)
        completion = Completion(
            uid=f"scripted/{self.calls}",
            prompt_ids=(1,),
            token_ids=token_ids,
            logprobs=(-1.0,) * len(token_ids),
            versions=(0,) * len(token_ids),
            finish_reason=self._finish_reason,
        )
        return Reply(text=text, completion=completion)


class EnvironmentConformance:
    """Subclass it, give `component`, and `options` when there are any. Invariant: no case needs a model."""

    disjoint_splits: ClassVar[bool] = True
    """Set to False by a task with so few questions that its splits must share some."""

    @pytest.fixture
    def component(self) -> Component:
        raise NotImplementedError("give the environment's Component in a fixture named 'component'")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The options as a recipe's table."""
        return {}

    @pytest.fixture
    def environment_factory(self, component: Component, options: dict[str, Any]) -> EnvironmentFactory:
        """Make one more instance for a context."""
        return lambda context: component.load()(component.parse_options(options), context)

    @pytest.fixture
    def environment(self, environment_factory: EnvironmentFactory) -> Environment:
        return environment_factory(CONTEXT)

    def test_it_keeps_the_contract(self, environment: Environment) -> None:
        assert isinstance(environment, Environment)

    @pytest.mark.parametrize("split", SPLITS)
    def test_prompts_are_a_sequence(self, environment: Environment, split: Split) -> None:
        prompts = environment.prompts(split)
        assert len(prompts) == len(environment.prompts(split)) > 0
        for index in _ends(prompts):
            assert isinstance(prompts[index], Prompt)
            assert (prompts[index].environment, prompts[index].index) == (CONTEXT.name, index)
            assert prompts[index] == prompts[index] == environment.prompts(split)[index]
        assert prompts[-1] == prompts[len(prompts) - 1]
        with pytest.raises(IndexError):
            prompts[len(prompts)]

    @pytest.mark.parametrize("split", SPLITS)
    def test_prompts_can_travel(self, environment: Environment, split: Split) -> None:
        for prompt in _some(environment.prompts(split)):
            assert pickle.loads(pickle.dumps(prompt)) == prompt
            assert prompt.messages, "a prompt needs a message"
            plain = {"messages": list(prompt.messages), "metadata": dict(prompt.metadata)}
            assert json.loads(json.dumps(plain, allow_nan=False)) == plain

    def test_two_instances_have_the_same_prompts(self, environment_factory: EnvironmentFactory) -> None:
        assert fingerprint(environment_factory(CONTEXT)) == fingerprint(environment_factory(CONTEXT))

    def test_a_fresh_process_has_the_same_prompts(
        self, component: Component, options: dict[str, Any], environment: Environment
    ) -> None:
        argument = pickle.dumps((component, options, CONTEXT)).hex()
        # The component may lie where only this process looks, beside the test that describes it.
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # noqa: TID251
        fresh = subprocess.run(
            [sys.executable, "-c", FINGERPRINT, argument],
            env=variables,
            capture_output=True,
            text=True,
            timeout=PROCESS_DEADLINE_S,
            check=False,
        )
        assert fresh.returncode == 0, fresh.stderr
        assert fresh.stdout.splitlines()[-1] == fingerprint(environment)

    def test_splits_are_disjoint(self, environment: Environment) -> None:
        if not self.disjoint_splits:
            pytest.skip("the task says that its splits share questions")
        train, test = ({str(p.messages) for p in _some(environment.prompts(split), 64)} for split in SPLITS)
        assert not train & test

    @pytest.mark.parametrize("finish_reason", ["stop", "length"])
    async def test_no_text_breaks_an_episode(self, environment: Environment, finish_reason: FinishReason) -> None:
        prompt = environment.prompts("train")[0]
        for name, text in ODD_TEXTS.items():
            client = ScriptedClient(text, finish_reason=finish_reason)
            assert_valid(await play(environment, prompt, client))
            assert client.calls > 0, f"the episode never asked the model ({name} text)"

    async def test_the_reference_earns_the_most(self, environment: Environment) -> None:
        prompts = [p for p in _some(environment.prompts("train"), NUM_REFERENCES) if p.answer]
        if not prompts:
            pytest.skip("the task has no reference answers")
        for prompt, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
            best = await play(environment, prompt, ScriptedClient(prompt.answer))
            assert best.status == "ok" and best.reward is not None, best
            unfinished = ScriptedClient(prompt.answer, finish_reason="length")
            rivals = [unfinished, *map(ScriptedClient, (other.answer, prompt.answer[:-1] or "x", "", "no idea"))]
            for rival in rivals:
                outcome = await play(environment, prompt, rival)
                assert_valid(outcome)
                assert outcome.reward is None or outcome.reward <= best.reward

    async def test_episodes_do_not_disturb_each_other(self, environment: Environment) -> None:
        prompts = _some(environment.prompts("train"), NUM_REFERENCES)
        pairs = [(prompt, text) for prompt in prompts for text in (prompt.answer, "no idea", "")]
        alone = [await play(environment, prompt, ScriptedClient(text)) for prompt, text in pairs]
        together = await asyncio.gather(*(play(environment, prompt, ScriptedClient(text)) for prompt, text in pairs))
        assert [(o.status, o.reward) for o in together] == [(o.status, o.reward) for o in alone]


async def play(environment: Environment, prompt: Prompt, client: ScriptedClient) -> Outcome:
    """Play one episode; TimeoutError when it does not end within EPISODE_DEADLINE_S."""
    return await asyncio.wait_for(environment.episode(prompt, client), EPISODE_DEADLINE_S)


def assert_valid(outcome: Outcome) -> None:
    """Check that only an ok outcome has a reward, a finite one, and that a failure says why."""
    assert isinstance(outcome, Outcome)
    if outcome.status == "ok":
        assert outcome.reward is not None and math.isfinite(outcome.reward)
        assert all(math.isfinite(value) for value in outcome.metrics.values())
    else:
        assert outcome.status in ("error", "timeout")
        assert outcome.reward is None and outcome.detail


def fingerprint(environment: Environment) -> str:
    """Return the lengths of both splits and the prompts at their ends as one line of JSON."""
    splits = {split: environment.prompts(split) for split in SPLITS}
    return json.dumps({split: [len(p), [asdict(prompt) for prompt in _some(p)]] for split, p in splits.items()})


def _ends(prompts: Sequence[Prompt], num: int = NUM_ENDS) -> list[int]:
    return sorted({*range(min(num, len(prompts))), *range(max(0, len(prompts) - num), len(prompts))})


def _some(prompts: Sequence[Prompt], num: int = NUM_ENDS) -> list[Prompt]:
    return [prompts[index] for index in _ends(prompts, num)]
