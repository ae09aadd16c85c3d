"""Word problems with a number as answer, in the format of GSM8K (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from areal.builtins.tasks.answers import MARK, after_mark
from areal.builtins.tasks.prompts import LazyPrompts
from areal.builtins.tasks.scoring import Scorer
from areal.contracts.environment import Client, Split
from areal.contracts.messages import Outcome, Prompt
from areal.contracts.options import Options
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, MissingLibrary

INSTALL = "pip install 'areal-core[tasks]'"


class Gsm8kOptions(Options):
    """Invariant: `data` alone decides where rows come from; nothing is looked up elsewhere."""

    data: str = "openai/gsm8k"
    """A JSONL file, a folder with one JSONL file for each split, or the name of an HF dataset; every row has the text
    fields ``question`` and ``answer``, and the answer ends with ``#### 42``."""
    subset: str = ""
    """Configuration of the HF dataset; ``main`` for the default dataset."""
    train_split: str = "train"
    """Name of the split, or of the folder's file without ``.jsonl``."""
    test_split: str = "test"
    test_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of a single file's rows, the last ones, that is held out as test split."""
    suffix: str = f"\nReason step by step and put the final answer, a number only, after {MARK}."
    """Text after the question."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds math-verify may take for one answer."""


class Gsm8k:
    """Reward 1 when math-verify finds the reply's final answer equal to the reference, else 0.

    Invariant: scoring happens in a process that can be killed; what it fails at is an ``error`` or a ``timeout``.
    """

    def __init__(self, options: Gsm8kOptions, context: EnvironmentContext) -> None:
        self._options = options
        self._name = context.name
        self._rows = load_rows(options)
        _require("math_verify", "math-verify")
        self._scorer = Scorer("areal.builtins.tasks.math_scorer:score", options.timeout_s)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        rows = self._rows[split]
        return LazyPrompts(len(rows), lambda index: self._prompt(rows[index], index))

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        reply = await client.chat(prompt.messages)
        return await self._scorer.score(text=reply.text, reference=prompt.metadata["reference"])

    def _prompt(self, row: Mapping[str, str], index: int) -> Prompt:
        return Prompt(
            environment=self._name,
            index=index,
            messages=({"role": "user", "content": row["question"] + self._options.suffix},),
            answer=row["answer"],
            metadata={"reference": after_mark(row["answer"])},
        )


def load_rows(options: Gsm8kOptions) -> dict[Split, Sequence[Mapping[str, str]]]:
    """Read both splits; ConfigError or MissingLibrary in one sentence."""
    path = Path(options.data).expanduser()
    names: dict[Split, str] = {"train": options.train_split, "test": options.test_split}
    if path.is_dir():
        return {split: list(read_jsonl(path / f"{name}.jsonl")) for split, name in names.items()}
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        rows = list(read_jsonl(path))
        if len(rows) < 2:
            raise ConfigError(f"{path} has one problem, but a train and a test split need at least two; add problems")
        num_test = min(len(rows) - 1, max(1, round(options.test_share * len(rows))))
        return {"train": rows[:-num_test], "test": rows[-num_test:]}
    return {split: read_dataset(options, name) for split, name in names.items()}


def read_jsonl(path: Path) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a file; ConfigError names the file and the line at the first row that cannot be used."""
    try:
        # utf-8-sig: some editors begin a file with a mark. Not splitlines: a JSON text may hold its other separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}; option 'data' must name a JSONL file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} is empty; give one JSON object with 'question' and 'answer' on each line")
    for number, line in numbered:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not valid JSON ({error})") from None
        yield checked(row, f"{path}, line {number}")


def read_dataset(options: Gsm8kOptions, split: str) -> Sequence[Mapping[str, str]]:
    """Load one split with the library ``datasets``; ConfigError or MissingLibrary in one sentence."""
    _require("datasets", "datasets")
    import datasets

    subset = options.subset or ("main" if options.data == "openai/gsm8k" else None)
    try:
        rows: Any = datasets.load_dataset(options.data, subset, split=split)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"cannot load split {split!r} of dataset {options.data!r}: {reason}; "
            "option 'data' must name a JSONL file, a folder of them or a dataset that can be reached"
        ) from None
    if not len(rows):
        raise ConfigError(f"split {split!r} of dataset {options.data!r} is empty; name another split")
    return [checked(row, f"dataset {options.data}, {split} row {number}") for number, row in enumerate(rows)]


def checked(row: Any, where: str) -> Mapping[str, str]:
    """Return the row's two fields, or raise ConfigError that says what is wrong `where`."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected an object with 'question' and 'answer', found {type(row).__name__}")
    for field in ("question", "answer"):
        value = row.get(field)
        if not isinstance(value, str) or not value.strip():
            found = ", ".join(map(str, row)) or "nothing"
            raise ConfigError(f"{where}: field {field!r} must be a text that is not empty; the row has: {found}")
    if not after_mark(row["answer"]):
        raise ConfigError(f"{where}: field 'answer' must end with the final answer after {MARK!r}, as in '{MARK} 42'")
    return {"question": row["question"], "answer": row["answer"]}


def _require(module: str, distribution: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingLibrary(f"'gsm8k' needs {distribution}, which is not installed; install it with: {INSTALL}")
