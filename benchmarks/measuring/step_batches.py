"""The rollouts of train_vs_trl.py, there before a step begins. Standard library only: both sides read them."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_TOKEN = 3
"""Those before it are padding, begin and end."""
TRL_EPS = 1e-4
"""What TRL adds to a group's standard deviation; both sides are given advantages by its formula."""
DENOMINATORS = {"prompt": 4, "shortest": 16}
"""Of a row's mean length: a prompt's share, and the share that the shortest answer of spread lengths has."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Rows of one batch. Invariant: all cases of the same mean have as many prompt and as many answer tokens."""

    title: str
    spread: bool = False
    """Answers from a sixteenth of the mean row up, evenly; else all are equally long."""
    shared: bool = False
    """The rows of a group have one prompt, as samples have; else each has its own, and nothing is shared."""

    def rows(self, groups: int, group_size: int, mean_tokens: int, vocab: int, seed: int) -> list[dict[str, Any]]:
        """Return rows with prompt, answer, reward and advantage, those of a group one after the other."""
        source = random.Random(seed)

        def tokens(number: int) -> list[int]:
            return [source.randrange(FIRST_TOKEN, vocab) for _ in range(number)]

        lengths = self._answers(groups * group_size, mean_tokens)
        source.shuffle(lengths)
        prompt_tokens = mean_tokens // DENOMINATORS["prompt"]
        found: list[dict[str, Any]] = []
        for group in range(groups):
            prompt = tokens(prompt_tokens)
            rewards = [round(source.random(), 3) for _ in range(group_size)]
            for reward, advantage in zip(rewards, advantages(rewards), strict=True):
                row = {"group": group, "reward": reward, "advantage": advantage}
                own = prompt if self.shared else tokens(prompt_tokens)
                found.append({**row, "prompt_ids": own, "answer_ids": tokens(lengths[len(found)])})
        return found

    def _answers(self, number: int, mean_tokens: int) -> list[int]:
        mean = mean_tokens - mean_tokens // DENOMINATORS["prompt"]
        shortest = max(1, mean_tokens // DENOMINATORS["shortest"]) if self.spread else mean
        return [round(shortest + i * 2 * (mean - shortest) / (number - 1)) for i in range(number)]


CASES = {
    "uniform": Lengths("rows of one length, nothing in common: no padding to save"),
    "spread": Lengths("lengths spread evenly, nothing in common: what padding costs", spread=True),
    "shared": Lengths("rows of one length, a group has one prompt: what common beginnings save", shared=True),
}


def advantages(rewards: list[float]) -> list[float]:
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + TRL_EPS) for reward in rewards]


def num_tokens(rows: list[dict[str, Any]]) -> int:
    """Return the tokens of all rows, without padding, a shared prompt counted in each."""
    return sum(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows)


def padded_tokens(rows: list[dict[str, Any]]) -> int:
    """Return the tokens that a batch has when all rows are filled up to its longest prompt and answer."""
    return len(rows) * sum(max(len(row[part]) for row in rows) for part in ("prompt_ids", "answer_ids"))


def read(paths: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each case by its name."""
    return {name: json.loads(Path(path).read_text(encoding="utf-8")) for name, path in paths.items()}


def write(folder: Path, batches: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the file of each case."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.json" for name in batches}
    for name, path in paths.items():
        path.write_text(json.dumps(batches[name]), encoding="utf-8")
    return {name: str(path) for name, path in paths.items()}
