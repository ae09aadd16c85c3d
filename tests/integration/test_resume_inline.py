"""Resuming in one process, where two runs can be compared bit for bit."""

from __future__ import annotations

import io
import shutil
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from areal.app import resume, run
from areal.config import load_recipe
from areal.errors import JournalError
from areal.monitor.summary import Summary
from areal.plugins import discover

SMALL = (
    "training.max_steps=3",
    "training.batch_size=2",
    "training.warmup.steps=2",
    "algorithm.group_size=4",
    "staleness.max=0",
    "evaluation.every_steps=0",
    "checkpoint={every_steps: 1, keep: 2}",
    "cluster.name=inline",
    "reshard.name=disk",
    "trackers=[jsonl]",
)


def finished(runs_dir: Path, algorithm: str) -> Summary:
    overrides = (*SMALL, f"runs_dir={runs_dir}", *(["algorithm.kl_coefficient=0.1"] if algorithm == "ppo" else []))
    config = load_recipe(None, overrides, {"algorithm": algorithm}, resolve=discover().resolve)
    return run(config, console=Console(quiet=True))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, algorithm: str, damage: str) -> None:
    """The step that is made again is the same step: critic, reference and optimizer came back, too."""
    whole = finished(tmp_path, algorithm)
    newest = whole.folder / "checkpoints" / "step-00000003"
    expected = load_file(newest / "model" / "model.safetensors")
    part = newest / "critic" / "trainer.pt" if algorithm == "ppo" else newest / "trainer.pt"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:1000])
    said = io.StringIO()
    again = resume(str(whole.folder), console=Console(file=said, width=400))
    assert said.getvalue().count("warning: ") == 1
    found = load_file(again.checkpoint / "model.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert [step for step, _ in again.steps] == [1, 2, 3]


def test_when_no_checkpoint_can_be_read_it_says_so(tmp_path: Path) -> None:
    whole = finished(tmp_path, "grpo")
    for path in (whole.folder / "checkpoints").iterdir():
        shutil.rmtree(path)
    said = io.StringIO()
    with pytest.raises(JournalError, match="none of the checkpoints in ") as caught:
        resume(str(whole.folder), console=Console(file=said, width=400))
    assert "\n" not in str(caught.value)
    assert said.getvalue().count("is not a checkpoint of the backend 'torch'") == 2
    with sqlite3.connect(whole.folder / "journal.sqlite") as journal:
        assert journal.execute("SELECT count(*) FROM checkpoints").fetchone() == (2,), "none was forgotten"
    journal.close()


def test_a_damaged_sample_is_set_aside_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run ends as it would have ended: an inline run makes the same sample again."""
    whole = finished(tmp_path, "grpo")
    expected = load_file(whole.checkpoint / "model.safetensors")
    with sqlite3.connect(whole.folder / "journal.sqlite") as journal:
        journal.execute("DELETE FROM checkpoints WHERE step = 3")
        (group,) = journal.execute("SELECT max(number) FROM groups").fetchone()
        journal.execute(
            "UPDATE trajectories SET body = substr(body, 1, 40) WHERE group_number = ? AND sample = 1", (group,)
        )
    journal.close()
    again = resume(str(whole.folder), console=Console(quiet=True))
    assert f"sample {group}/1 was set aside in the table damaged and is made anew" in caplog.text
    found = load_file(again.checkpoint / "model.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    with sqlite3.connect(whole.folder / "journal.sqlite") as journal:
        assert journal.execute("SELECT group_number, sample, length(body) FROM damaged").fetchall() == [(group, 1, 40)]
        there = "SELECT count(*) FROM trajectories WHERE group_number = ?"
        assert journal.execute(there, (group,)).fetchone() == (4,)
    journal.close()
