"""Tasks of the library reasoning-gym: generated without a data set, each with a scorer of its own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field

from areal.builtins.tasks.answers import in_tag, last_number
from areal.builtins.tasks.prompts import LazyPrompts
from areal.builtins.tasks.scoring import Scorer
from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, MissingLibrary, did_you_mean

# One question in so many is held out, chosen by a checksum of its text.
HOLD_OUT = 8
# Candidates looked at for one prompt; a task with fewer than about HOLD_OUT questions may run out of them.
MAX_DRAWS = 128


class ReasoningGymOptions(Options):
    """Invariant: `config` is the task's own table and is checked by the task itself."""

    task: str
    """A name that reasoning-gym knows, for example ``chain_sum``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, for example ``{min_terms: 2, max_terms: 2}``."""
    size: int = Field(default=1000, ge=1)
    """Length of the train split."""
    test_size: int = Field(default=128, ge=1)
    """Length of the test split."""
    suffix: str = ""
    """Text after the question."""
    extract: Literal["whole", "last_number", "tag"] = "whole"
    """What of the reply is scored: all of it, its last number, or the content of the last ``<tag>``."""
    tag: str = Field(default="answer", min_length=1)
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds the scorer may take for one answer."""


class ReasoningGym:
    """Reward is the task's own score of the extracted answer, 0..1.

    Invariant: a question text is in the train or in the test split, never in both, unless the task has too few.
    """

    def __init__(self, options: ReasoningGymOptions, context: EnvironmentContext) -> None:
        self._options = options
        self._name = context.name
        self._stride = options.size + options.test_size
        self._config = {**options.config, "seed": context.seed, "size": self._stride * MAX_DRAWS}
        self._dataset = create_dataset(options, self._config)
        self._scorer = Scorer("areal.builtins.tasks.reasoning_gym_scorer:score", options.timeout_s)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        size = self._options.size if split == "train" else self._options.test_size
        return LazyPrompts(size, lambda index: self._prompt(split, index))

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        return await self._scorer.score(
            task=self._options.task,
            config=self._config,
            item=prompt.metadata["item"],
            answer=self._extract(reply.text),
        )

    def _prompt(self, split: Split, index: int) -> Prompt:
        first = index if split == "train" else self._options.size + index
        for item in range(first, first + self._stride * MAX_DRAWS, self._stride):
            entry = self._dataset[item]
            if (zlib.crc32(entry["question"].encode()) % HOLD_OUT == 0) == (split == "test"):
                break
        else:
            item, entry = first, self._dataset[first]
        return Prompt(
            environment=self._name,
            index=index,
            messages=({"role": "user", "content": entry["question"] + self._options.suffix},),
            answer=self._wrap(entry["answer"]),
            metadata={"item": item},
        )

    def _extract(self, text: str) -> str | None:
        match self._options.extract:
            case "whole":
                return text.strip()
            case "last_number":
                return last_number(text)
            case "tag":
                return in_tag(text, self._options.tag)

    def _wrap(self, answer: str | None) -> str:
        # Some tasks have no single right answer, and so no reference.
        if answer is None or self._options.extract != "tag":
            return answer or ""
        return f"<{self._options.tag}>{answer}</{self._options.tag}>"


def create_dataset(options: ReasoningGymOptions, config: dict[str, Any]) -> Any:
    """Make the task's generator; MissingLibrary or ConfigError in one sentence."""
    if find_spec("reasoning_gym") is None:
        raise MissingLibrary(
            "'reasoning_gym' needs reasoning-gym, which is not installed; "
            "install it with: pip install 'areal-core[tasks]'"
        )
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.factory import create_dataset as make

    if options.task not in DATASETS:
        hint = did_you_mean(options.task, DATASETS) or "; see the gallery of reasoning-gym"
        raise ConfigError(f"reasoning-gym has no task {options.task!r} among its {len(DATASETS)}{hint}")
    if reserved := {"seed", "size"} & options.config.keys():
        raise ConfigError(f"config of task {options.task!r} must not set {', '.join(sorted(reserved))}: the run does")
    known = DATASETS[options.task][1].__dataclass_fields__
    for key in options.config:
        if key not in known:
            raise ConfigError(f"task {options.task!r} has no setting {key!r}{did_you_mean(key, known)}")
    try:
        dataset = make(options.task, **config)
        dataset[0]
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"task {options.task!r} refuses its config {options.config}: {reason}") from None
    return dataset
