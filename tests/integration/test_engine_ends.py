"""An engine that is broken for good while its process lives leaves the fleet by itself, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from areal.app import run
from areal.builtins.transformers_engine.engine import TransformersEngine
from areal.config import load_recipe
from areal.contracts.transfer import Layout
from areal.plugins import discover

OVERRIDES = (
    "training.max_steps=6",
    "training.batch_size=4",
    "algorithm.group_size=4",
    "training.warmup.steps=0",
    "evaluation.every_steps=0",
    "cluster.name=inline",
    "trackers=[jsonl]",
)


STARTED: list[str] = []


class Mortal(TransformersEngine):
    """Invariant: the run's first engine breaks for good after 100 tokens; `STARTED` names all that started."""

    async def start(self) -> Layout:
        STARTED.append(self._context.name)
        return await super().start()

    async def ended(self) -> str:
        while self._context.name != "engine-0" or self.load()["tokens_total"] < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._paused = True  # it answers nobody any more
        return "the chip is on fire"


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    STARTED.clear()
    monkeypatch.setattr("areal.builtins.transformers_engine.engine.TransformersEngine", Mortal)
    overrides = (*OVERRIDES, f"runs_dir={tmp_path}", f"engine.replicas={replicas}")
    summary = run(load_recipe(None, overrides, {}, discover().resolve), console=Console(quiet=True))
    expected = [f"engine-{number}" for number in range(replicas + 1)]
    assert expected == STARTED
    lines = (summary.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    with sqlite3.connect(summary.folder / "journal.sqlite") as journal:
        trained = [number for (number,) in journal.execute("SELECT group_number FROM consumed WHERE fate = 'trained'")]
    assert len(trained) == len(set(trained)) == 24
