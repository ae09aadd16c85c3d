"""The journal: what was acknowledged is there whatever was killed, and a resumed run goes on from the checkpoint."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from flow_samples import make_group, make_prompt, make_trajectory

from areal.contracts.messages import Outcome, StepReport, Trajectory
from areal.errors import JournalError
from areal.flow.buffer.buffer import ReplayBuffer
from areal.flow.buffer.journal import Issued, Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def issue(number: int, num_samples: int = 2) -> Issued:
    return Issued(number=number, environment="digits", prompt_index=number, num_samples=num_samples, issued_version=0)


def report(step: int, *groups: int, reward: float = 0.5) -> StepReport:
    return StepReport(step=step, version=step, groups=groups, metrics={"reward/mean": reward})


def finish(journal: Journal, *numbers: int, samples: tuple[int, ...] = (0, 1)) -> None:
    for number in numbers:
        parts = [make_trajectory(number, sample, version=number) for sample in samples]
        journal.finished([(number, make_prompt(number))], parts)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from flow_samples import make_prompt, make_trajectory
from areal.contracts.messages import StepReport
from areal.flow.buffer.journal import Issued, Journal

journal = Journal(Path(sys.argv[1]), create=True)
for number in range(100_000):
    journal.issued([Issued(number=number, environment="e", prompt_index=number, num_samples=2, issued_version=0)])
    print("issued", number, flush=True)
    for sample in (0, 1):
        trajectory = make_trajectory(number, sample, reward=number + sample / 2)
        journal.finished([(number, make_prompt(number))], [trajectory, trajectory])
        print("finished", number, sample, flush=True)
    journal.stepped(StepReport(step=number + 1, version=number + 1, groups=(number,), metrics={"x": number}))
    print("stepped", number, flush=True)
    if number % 5 == 0:
        journal.checkpointed(number + 1, f"checkpoints/{number + 1}")
        print("saved", number + 1, flush=True)
"""


@pytest.mark.parametrize("num_lines", [20, 83, 141])
def test_kill_9_loses_nothing_that_was_acknowledged(path: Path, num_lines: int) -> None:
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(num_lines)]
        os.kill(writer.pid, signal.SIGKILL)  # in the middle of whatever it does next
        said += [line for line in writer.stdout if line.endswith("\n")]
    assert writer.returncode == -signal.SIGKILL
    acknowledged = {tuple(line.split()) for line in said}

    journal = Journal(path, create=False)
    with sqlite3.connect(path) as reader:
        finished = list(reader.execute("SELECT group_number, sample FROM trajectories"))
        consumed = [number for (number,) in reader.execute("SELECT group_number FROM consumed")]
        assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    reader.close()
    assert len(set(finished)) == len(finished) and len(set(consumed)) == len(consumed)
    assert {(number, sample) for number, sample in finished} >= {
        (int(line[1]), int(line[2])) for line in acknowledged if line[0] == "finished"
    }
    assert set(consumed) >= {int(line[1]) for line in acknowledged if line[0] == "stepped"}
    assert [step for step, _ in journal.metrics()] == list(range(1, len(consumed) + 1))
    saved = [int(line[1]) for line in acknowledged if line[0] == "saved"]
    assert {step for step, _ in journal.checkpoints()} >= set(saved)

    recovery = journal.recover()
    assert recovery.step >= max(saved)
    again = {group.number for group in recovery.complete} | {issued.number for issued, _ in recovery.unfinished}
    assert again == set(range(recovery.step, recovery.num_issued)), "exactly what no kept step consumed"
    for group in recovery.complete:
        assert [t.outcome.reward for t in group.trajectories] == [group.number, group.number + 0.5]
    journal.close()


def test_recover_takes_back_what_later_steps_consumed(path: Path) -> None:
    journal = Journal(path, create=True)
    journal.issued([issue(number) for number in range(8)])
    finish(journal, 0, 1, 2, 3, 4, 5)
    finish(journal, 6, samples=(1,))
    journal.dropped([1], step=1)
    journal.stepped(report(1, 0, 2))
    journal.evaluated(1, {"eval/reward/mean": 0.25})
    journal.checkpointed(1, "checkpoints/step-1")
    journal.dropped([3], step=2)
    journal.stepped(report(2, 4))
    journal.evaluated(2, {"eval/reward/mean": 0.75})
    journal.published(2)
    journal.close()

    journal = Journal(path, create=False)
    for _ in range(2):  # going back twice is going back once
        recovery = journal.recover()
        assert (recovery.step, recovery.checkpoint) == (1, "checkpoints/step-1")
        assert [group.number for group in recovery.complete] == [3, 4, 5]
        assert recovery.unfinished == ((issue(6), (0,)), (issue(7), (0, 1)))
        assert (recovery.num_issued, recovery.num_dropped) == (8, 1)
        assert journal.metrics() == [(1, {"reward/mean": 0.5})]
        assert journal.metrics("evaluations") == [(1, {"eval/reward/mean": 0.25})]
    assert recovery.complete[0] == make_group(3, [make_trajectory(3, sample, version=3) for sample in (0, 1)])
    journal.stepped(report(2, 3, 4))
    with pytest.raises(JournalError, match="cannot be written: UNIQUE constraint failed"):
        journal.stepped(report(3, 4, 5))
    assert [step for step, _ in journal.metrics()] == [1, 2], "a transaction that fails leaves nothing"
    journal.stepped(report(3, 5))
    journal.close()


def test_the_first_copy_of_a_trajectory_counts(path: Path) -> None:
    journal = Journal(path, create=True)
    journal.issued([issue(0)])
    journal.finished([(0, make_prompt())], [make_trajectory(0, 1, reward=0.25)])
    journal.finished([(0, make_prompt())], [make_trajectory(0, 1, reward=0.75), make_trajectory(0, 0)])
    assert [t.outcome.reward for t in journal.trajectories(0)] == [1.0, 0.25]
    assert journal.trajectories(7) == ()
    journal.close()


def test_failed_outcomes_are_kept_as_they_are(path: Path) -> None:
    journal = Journal(path, create=True)
    journal.issued([issue(0)])
    parts = [
        Trajectory(group=0, sample=sample, turns=(), outcome=outcome)
        for sample, outcome in enumerate([Outcome.error("no 🦆\nfound"), Outcome.timeout("30 s")])
    ]
    journal.finished([], parts)
    assert journal.trajectories(0) == tuple(parts)
    journal.close()


def test_checkpoints_in_order_and_forgotten(path: Path) -> None:
    journal = Journal(path, create=True)
    for step in (10, 2, 5):
        journal.checkpointed(step, f"checkpoints/{step}")
    journal.checkpointed(5, "checkpoints/5b")
    journal.forget_checkpoint(2)
    assert journal.checkpoints() == [(5, "checkpoints/5b"), (10, "checkpoints/10")]
    journal.close()


def test_a_value_that_cannot_be_stored_leaves_the_journal_usable(path: Path) -> None:
    journal = Journal(path, create=True)
    with pytest.raises(OverflowError):
        journal.issued([issue(0), issue(2**70)])
    journal.issued([issue(0)])
    journal.close()


def test_what_cannot_be_opened(tmp_path: Path, path: Path) -> None:
    with pytest.raises(JournalError, match="has no journal, so there is nothing to resume; start a run with"):
        Journal(path, create=False)
    with pytest.raises(JournalError, match=r"cannot be used: unable to open database file"):
        Journal(tmp_path / "no" / "folder", create=True)
    path.write_bytes(b"this is a text, not a database" * 100)
    with pytest.raises(JournalError, match=r"is damaged: file is not a database; nothing in it was changed"):
        Journal(path, create=False)
    (tmp_path / "empty").touch()
    with pytest.raises(JournalError, match=r"is empty: the run ended before its first step"):
        Journal(tmp_path / "empty", create=False)


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(JournalError, match=r"journal.sqlite cannot be used: unable to open database file"):
        Journal(Path("/proc/journal.sqlite"), create=True)  # read-only for everybody, root too


def test_a_journal_is_made_once(path: Path) -> None:
    Journal(path, create=True).close()
    with pytest.raises(JournalError, match="has a journal already; go on with it with areal resume"):
        Journal(path, create=True)
    Journal(path, create=False).close()


@pytest.mark.parametrize(
    ("statement", "there"),
    [("UPDATE meta SET value = '99'", "99"), ("DELETE FROM meta", "none")],
)
def test_another_schema(path: Path, statement: str, there: str) -> None:
    Journal(path, create=True).close()
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    with pytest.raises(JournalError, match=f"has schema {there}, this AReaL reads 1 and 2"):
        Journal(path, create=False)


def test_nothing_to_recover(path: Path) -> None:
    journal = Journal(path, create=True)
    with pytest.raises(JournalError, match="has no complete checkpoint; start the run anew with areal run"):
        journal.recover()
    journal.close()


def test_writing_to_a_locked_or_closed_journal_is_one_sentence(path: Path) -> None:
    journal = Journal(path, create=True)
    journal._database._db.execute("PRAGMA busy_timeout=10")  # five seconds by default
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="cannot be written: database is locked; another process holds it"):
            journal.published(1)
        other.execute("ROLLBACK")
    other.close()
    journal.published(1)
    journal.close()
    with pytest.raises(JournalError, match="cannot be read: Cannot operate on a closed database"):
        journal.metrics()


async def test_going_back_in_the_middle_of_a_run(path: Path) -> None:
    """The trainer died in step 3 and starts again from step 1; engines, rollouts and the buffer go on."""
    journal = Journal(path, create=True)
    buffer = ReplayBuffer(journal, max_staleness=9, on_excess="drop", keep=lambda group: group.number != 3)
    buffer.expect([issue(number) for number in range(8)])

    async def arrive(*parts: tuple[int, int]) -> None:
        for number, sample in parts:
            buffer.put(number, make_prompt(number))
            buffer.put(number, make_trajectory(number, sample, version=number))
        buffer.flush()

    await arrive(*((number, sample) for number in range(3) for sample in (0, 1)), (6, 0))
    for step, numbers in ((1, [0]), (2, [1, 2])):
        taken = buffer.take(len(numbers), step - 1, step)
        assert taken is not None and [group.number for group in taken] == numbers
        journal.stepped(report(step, *numbers))
        journal.published(step)
        if step == 1:
            journal.checkpointed(1, "checkpoints/step-1")
    await arrive(*((number, sample) for number in (3, 4, 5) for sample in (0, 1)), (7, 1))
    assert [group.number for group in buffer.take(1, 2, 3) or []] == [4], "3 is passed over; 4 is in the trainer"

    recovery = journal.recover()
    assert (recovery.step, recovery.num_issued, recovery.num_dropped) == (1, 8, 0)
    assert [group.number for group in recovery.complete] == [1, 2, 3, 4, 5]
    assert [(issued.number, missing) for issued, missing in recovery.unfinished] == [(6, (1,)), (7, (0,))]
    assert [step for step, _ in journal.metrics()] == [1]
    assert journal._database.rows("SELECT version FROM versions") == [(1,)], "later weights are forgotten"
    buffer.restore(recovery.complete, ())  # what is being made goes on being made

    await arrive((6, 1), (7, 0), (1, 0))  # and a late second copy
    assert (buffer.num_ready, buffer.num_gathering) == (7, 0)
    taken = buffer.take(6, 1, 2)
    assert taken is not None and [group.number for group in taken] == [1, 2, 4, 5, 6, 7]
    journal.stepped(report(2, *(group.number for group in taken)))
    consumed = journal._database.rows("SELECT group_number, step, fate FROM consumed ORDER BY group_number")
    others = [(number, 2, "trained") for number in (1, 2, 4, 5, 6, 7)]
    assert consumed == sorted([(0, 1, "trained"), (3, 2, "passed_over"), *others])
    journal.close()
