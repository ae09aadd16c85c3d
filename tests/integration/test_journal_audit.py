"""The auditor finds nothing in a good journal, and each kind of fault in a bad one."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import measuring
import pytest

from areal.contracts.messages import Outcome, Prompt, StepReport, Trajectory
from areal.flow.buffer.journal import Issued, Journal

AUDIT = Path(measuring.__file__).with_name("audit.py")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of two groups, one group too old, two open ones of which one is half made; sealed after step 2."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\ntraining:\n  batch_size: 2\n  max_steps: 3\nbackend:\n  name: torch\n")
    journal = Journal(run / "journal.sqlite", create=True)
    journal.issued(
        [Issued(number=n, environment="e", prompt_index=n, num_samples=2, issued_version=0) for n in range(10)]
    )
    for number in range(9):
        outcome = Outcome.scored(number / 2)
        prompt = Prompt(environment="e", index=number, messages=())
        journal.finished(
            [(number, prompt)], [Trajectory(group=number, sample=s, turns=(), outcome=outcome) for s in (0, 1)]
        )
    journal.dropped([2], 1)
    for step, groups in ((1, (0, 1)), (2, (3, 4)), (3, (5, 6))):
        journal.stepped(StepReport(step=step, version=step, groups=groups, metrics={}))
        if step == 2:
            journal.checkpointed(2, "checkpoints/2")
    journal.close()
    return run


def audit(run: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(AUDIT), str(run), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


def execute(run: Path, *statements: str) -> None:
    db = sqlite3.connect(run / "journal.sqlite", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def test_it_imports_nothing_of_areal(run: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-S", "-E", str(AUDIT), str(run)], capture_output=True, text=True, timeout=60
    )  # without site-packages
    assert ended.returncode == 0 and "lost 0" in ended.stdout, ended.stderr


def test_a_good_journal(run: Path) -> None:
    code, said = audit(run, "--snapshot", str(run / "snapshot.json"))
    assert code == 0 and said.splitlines()[-1] == "lost 0, twice 0, missing 0"
    assert audit(run, "--snapshot", str(run / "snapshot.json"))[0] == 0


LOOSE = "CREATE TABLE loose AS SELECT * FROM {0}; DROP TABLE {0}; ALTER TABLE loose RENAME TO {0}"
"""A table without its keys, so that rows may stand in it twice."""


@pytest.mark.parametrize(
    ("statements", "count", "line"),
    [
        ("DELETE FROM groups WHERE number = 8", "lost 1, twice 0, missing 0", "groups never issued: 1 (8)"),
        ("INSERT INTO consumed VALUES (77, 1, 'stale')", "lost 1, twice 0, missing 0", "never issued: 1 (77)"),
        (
            "DELETE FROM trajectories WHERE group_number = 2 AND sample = 1",
            "lost 0, twice 0, missing 1",
            "samples of consumed groups: 1 ((2, 1))",
        ),
        (
            "UPDATE trajectories SET sample = 5 WHERE group_number = 2 AND sample = 1",
            "lost 0, twice 1, missing 1",
            "samples that nobody asked for: 1 ((2, 5))",
        ),
        (
            LOOSE.format("trajectories")
            + "; INSERT INTO trajectories SELECT * FROM trajectories WHERE group_number = 3",
            "lost 0, twice 2, missing 0",
            "samples made again: 2 ((3, 0), (3, 1))",
        ),
        (
            LOOSE.format("consumed") + "; INSERT INTO consumed VALUES (0, 2, 'stale')",
            "lost 0, twice 1, missing 0",
            "groups consumed again: 1 (0)",
        ),
        (
            LOOSE.format("consumed") + "; INSERT INTO consumed VALUES (0, 2, 'trained')",
            "lost 0, twice 2, missing 0",
            "groups beyond a step's batch: 1 (2)",
        ),
        (
            LOOSE.format("groups") + "; INSERT INTO groups SELECT * FROM groups WHERE number = 4",
            "lost 0, twice 1, missing 0",
            "groups issued again: 1 (4)",
        ),
        ("DELETE FROM steps WHERE step = 2", "lost 0, twice 0, missing 1", "training steps: 1 (2)"),
        ("DELETE FROM steps WHERE step = 3", "lost 0, twice 0, missing 1", "training steps: 1 (3)"),
        ("DELETE FROM consumed WHERE group_number = 4", "lost 0, twice 0, missing 1", "groups of steps: 1"),
    ],
)
def test_a_broken_journal(run: Path, statements: str, count: str, line: str) -> None:
    execute(run, *statements.split("; "))
    code, said = audit(run)
    assert code == 1 and said.splitlines()[-1] == count and line in said, said


def test_what_a_snapshot_saw_must_stay(run: Path) -> None:
    seen = str(run / "snapshot.json")
    assert audit(run, "--snapshot", seen)[0] == 0
    # Not consumed, and so of no other interest: only the snapshot knows that it was there.
    execute(run, "DELETE FROM trajectories WHERE group_number = 8 AND sample = 0")
    assert audit(run)[0] == 0
    for _ in range(2):  # and it is not forgotten
        code, said = audit(run, "--snapshot", seen)
        assert code == 1 and "lost: samples that a snapshot saw: 1 (8/0)" in said
    journal = Journal(run / "journal.sqlite", create=False)
    journal.finished([], [Trajectory(group=8, sample=0, turns=(), outcome=Outcome.scored(1.0))])
    journal.close()
    assert audit(run, "--snapshot", seen)[0] == 1, "another one in its place is not the same"


def test_compaction_and_samples_set_aside_are_no_loss(run: Path) -> None:
    seen = str(run / "snapshot.json")
    assert audit(run, "--snapshot", seen)[0] == 0
    execute(run, "UPDATE trajectories SET body = '?' WHERE group_number = 8 AND sample = 0")
    journal = Journal(run / "journal.sqlite", create=False)
    while journal.compact(2, 1):
        pass
    recovery = journal.recover()
    assert recovery.step == 2 and len(recovery.unfinished) == 2
    journal.finished([], [Trajectory(group=8, sample=0, turns=(), outcome=Outcome.scored(1.0))])
    journal.stepped(StepReport(step=3, version=3, groups=(5, 6), metrics={}))
    journal.issued([Issued(number=10, environment="e", prompt_index=0, num_samples=2, issued_version=0)])
    code, said = audit(run, "--snapshot", seen)  # while the journal is open
    journal.close()
    assert code == 0 and "1 samples set aside" in said, said


def test_groups_before_a_checkpoint_stay_consumed_as_they_were(run: Path) -> None:
    seen = str(run / "snapshot.json")
    assert audit(run, "--snapshot", seen)[0] == 0
    execute(run, "UPDATE consumed SET step = step + 10 WHERE step = 3")  # after the checkpoint: may be made again
    execute(run, "UPDATE steps SET step = 3 WHERE step = 3", "UPDATE consumed SET step = 3 WHERE step = 13")
    assert audit(run, "--snapshot", seen)[0] == 0
    execute(run, "UPDATE consumed SET step = 12 WHERE step = 2", "UPDATE consumed SET step = 2 WHERE step = 3")
    execute(run, "UPDATE consumed SET step = 3 WHERE step = 12")
    code, said = audit(run, "--snapshot", seen)
    assert code == 1 and "groups consumed before a checkpoint that a snapshot saw: 2 (3, 4)" in said, said


def test_what_cannot_be_audited(tmp_path: Path, run: Path) -> None:
    code, said = audit(tmp_path)
    assert code == 2 and "cannot be audited: unable to open database file" in said
    (run / "config.yaml").write_text("training: {}\n")
    code, said = audit(run)
    assert code == 2 and "does not say training.batch_size; give --batch-size" in said
    assert audit(run, "--batch-size", "2")[0] == 0
    raw = (run / "journal.sqlite").read_bytes()
    (run / "journal.sqlite").write_bytes(raw[: len(raw) // 2])
    assert audit(run, "--batch-size", "2")[0] == 2
