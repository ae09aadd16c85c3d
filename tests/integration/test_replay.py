"""`areal replay`: the same numbers, bit for bit, whatever the algorithm; and it notices when they are not."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from areal.app import replay, resume, run
from areal.cli.main import group
from areal.config import load_recipe
from areal.errors import JournalError
from areal.flow.buffer.codec import decode_trajectory, encode_trajectory
from areal.plugins import discover

SMALL = (
    "device=cpu",
    "training.max_steps=4",
    "training.batch_size=2",
    "training.warmup.steps=2",
    "algorithm.group_size=4",
    "evaluation.every_steps=0",
    "checkpoint={every_steps: 1, keep: 9}",
    "cluster.name=inline",
    "reshard.name=disk",
    "parity.prompts=0",
    "trackers=[]",
)


def finished(runs_dir: Path, *overrides: str, algorithm: str = "grpo") -> Path:
    arguments = (*SMALL, f"runs_dir={runs_dir}", *overrides)
    config = load_recipe(None, arguments, {"algorithm": algorithm}, resolve=discover().resolve)
    return run(config, console=Console(quiet=True)).folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a run, but for SQLite's two scratch files."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def execute(folder: Path, statement: str, *values: object) -> list[tuple]:
    db = sqlite3.connect(folder / "journal.sqlite")
    with db:
        rows = db.execute(statement, values).fetchall()
    db.close()
    return rows


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("grpo", ("training.warmup.steps=40",)),  # answers that earn something: an update that is not nothing
        ("grpo", ("training.minibatches=2", "training.micro_batch_tokens=64")),
        ("grpo", ("staleness={max: 1, on_excess: mask}", "engine.max_batch=2", "training.minibatches=2")),
        ("grpo", ("algorithm.kl_coefficient=0.1", "training.warmup.steps=20")),
        ("ppo", ("algorithm.kl_coefficient=0.1", "training.minibatches=2")),
        ("dapo", ("staleness.order=finished", "training.warmup.steps=40")),
    ],
    ids=["plain", "minibatches", "mask", "reference", "critic", "dapo"],
)
def test_every_step_comes_out_again(tmp_path: Path, algorithm: str, overrides: tuple[str, ...]) -> None:
    folder = finished(tmp_path, *overrides, algorithm=algorithm)
    before = contents(folder)
    said = io.StringIO()
    for step, keep in ((1, "0"), (3, "2"), (4, "0")):
        if step == 4:  # from the first checkpoint, over all the steps between
            execute(folder, "DELETE FROM checkpoints WHERE step BETWEEN 1 AND 3")
        found = replay(str(folder), step, console=Console(file=said, width=200))
        assert found.differing == () and found.on_the_way == () and found.checkpoint == int(keep)
        names = {one.name for one in found.compared}
        assert {"train/loss", "train/grad_norm", "rows/without_advantage", "staleness/masked_tokens"} <= names
        assert ("critic/loss" in names) == (algorithm == "ppo")
        assert f"step {step} is the same, bit for bit" in said.getvalue()
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} <= {"journal.sqlite"}, "and that was this test"
    assert before.keys() == after.keys()


def test_a_resumed_run_with_a_schedule(tmp_path: Path) -> None:
    folder = finished(tmp_path, "training.max_steps=6", "training.schedule=cosine", "training.warmup.steps=40")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    (folder / "checkpoints" / "step-00000005" / "trainer.pt").write_bytes(b"damaged")
    resume(str(folder), console=Console(quiet=True))
    for step in (5, 6):
        assert replay(str(folder), step, console=Console(quiet=True)).differing == ()


def test_old_tokens_are_masked_as_in_the_run(tmp_path: Path) -> None:
    folder = finished(tmp_path, "staleness={max: 1, on_excess: mask}", "training.warmup.steps=40")
    num_masked = 0
    for number, sample, *row in execute(
        folder,
        "SELECT group_number, sample, body, tokens FROM trajectories WHERE group_number IN "
        "(SELECT group_number FROM consumed WHERE step = 4)",
    ):
        trajectory = decode_trajectory(number, sample, *row)
        turns = tuple(replace(turn, versions=(1, *turn.versions[1:])) for turn in trajectory.turns)
        num_masked += sum(version < 2 for turn in turns for version in turn.versions)
        put = "UPDATE trajectories SET body = ?, tokens = ? WHERE group_number = ? AND sample = ?"
        execute(folder, put, *encode_trajectory(replace(trajectory, turns=turns)), number, sample)
    found = {one.name: one for one in replay(str(folder), 4, console=Console(quiet=True)).compared}
    assert found["staleness/masked_tokens"].recomputed == num_masked > 0


def test_a_tampered_sample_is_noticed(tmp_path: Path) -> None:
    folder = finished(tmp_path, "training.warmup.steps=40")
    (number,) = execute(folder, "SELECT max(group_number) FROM consumed WHERE step = 2 AND fate = 'trained'")[0]
    (row,) = execute(folder, "SELECT body, tokens FROM trajectories WHERE group_number = ? AND sample = 1", number)
    sample = decode_trajectory(number, 1, *row)
    changed = replace(sample, outcome=replace(sample.outcome, reward=(sample.outcome.reward or 0.0) + 3.0))
    put = "UPDATE trajectories SET body = ?, tokens = ? WHERE group_number = ? AND sample = 1"
    execute(folder, put, *encode_trajectory(changed), number)
    ended = CliRunner().invoke(group, ["replay", str(folder), "--step", "2"])
    assert ended.exit_code == 1 and "step 2 differs in" in ended.output and "train/loss" in ended.output, ended.output
    # A step after it, computed from a checkpoint before it, says where it began to differ.
    execute(folder, "DELETE FROM checkpoints WHERE step = 2")
    ended = CliRunner().invoke(group, ["replay", str(folder), "--step", "3"])
    assert ended.exit_code == 1 and "step 2, on the way, differs in" in ended.output
    # Whoever changes a row without its checksum is told that.
    execute(folder, "UPDATE trajectories SET body = replace(body, '\"ok\"', '\"no\"') WHERE group_number = ?", number)
    ended = CliRunner().invoke(group, ["replay", str(folder), "--step", "2"])
    assert ended.exit_code == 2
    assert ended.output == f"error: trajectory {number}/0 in the journal is damaged (its checksum does not match)\n"


def test_a_tampered_metric_is_named_and_rtol_forgives(tmp_path: Path) -> None:
    folder = finished(tmp_path, "training.warmup.steps=40")
    ((text,),) = execute(folder, "SELECT metrics FROM steps WHERE step = 2")
    metrics = json.loads(text)
    metrics["train/entropy"] *= 1 + 1e-6
    execute(folder, "UPDATE steps SET metrics = ? WHERE step = 2", json.dumps(metrics))
    ended = CliRunner().invoke(group, ["replay", str(folder), "--step", "2"])
    assert ended.exit_code == 1 and ended.output.splitlines()[-1] == "step 2 differs in train/entropy"
    ended = CliRunner().invoke(group, ["replay", str(folder), "--step", "2", "--rtol", "1e-5"])
    assert ended.exit_code == 0 and ended.output.splitlines()[-1] == "step 2 is the same within 1e-05"
    metrics["train/made_up"] = 1.0
    execute(folder, "UPDATE steps SET metrics = ? WHERE step = 2", json.dumps(metrics))
    ended = CliRunner().invoke(group, ["replay", str(folder), "--step", "2", "--rtol", "1e-5"])
    assert ended.exit_code == 1 and ended.output.splitlines()[-1] == "step 2 differs in train/made_up"


def test_what_cannot_be_replayed_is_one_sentence(tmp_path: Path) -> None:
    folder = finished(tmp_path, "checkpoint={every_steps: 2, keep: 2}")

    def sentence(step: int) -> str:
        with pytest.raises(JournalError) as caught:
            replay(str(folder), step, console=Console(quiet=True))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "begins with a checkpoint of step 1 or before, and the run has kept 2, 4; steps 3 to 4 can" in sentence(2)
    assert "a larger checkpoint.keep, or a smaller checkpoint.every_steps, lets more of them be replayed" in sentence(1)
    assert "the run has done the steps 1 to 4; steps 3 to 4 can be replayed" in sentence(5)
    execute(folder, "UPDATE trajectories SET tokens = NULL")
    assert "has lost its tokens: the journal had grown to journal.max_mb" in sentence(3)
    execute(folder, "DELETE FROM trajectories WHERE sample = 2")
    execute(folder, 'UPDATE trajectories SET body = \'{"turns": [], "outcome": {"status": "timeout"}}\'')
    assert "has 3 samples in the journal and was trained with 4" in sentence(3)
    execute(folder, "DELETE FROM consumed")
    assert "the journal has no group that it trained on" in sentence(3)
    execute(folder, "DELETE FROM checkpoints")
    assert "the run has kept none; no step of it can be replayed" in sentence(3)
    with pytest.raises(JournalError, match="no run 'nothing' here"):
        replay("nothing", 1, runs_dir=str(tmp_path))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    state = folder / "checkpoints" / "step-00000002" / "trainer.pt"
    raw = bytearray(state.read_bytes())
    raw[len(raw) // 2] ^= 255
    state.write_bytes(raw)
    with pytest.raises(JournalError, match=r"is damaged: trainer.pt is not what was saved"):
        replay(str(folder), 3, console=Console(quiet=True))
