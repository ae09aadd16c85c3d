"""A journal stays small: what no kept checkpoint could need loses its tokens, and nothing else."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from flow_samples import handle_of, make_prompt, make_trajectory
from measuring import journal_v1

from areal.contracts.messages import Completion, StepReport
from areal.errors import JournalError
from areal.flow.buffer.journal import Issued, Journal
from areal.flow.buffer.view import JournalView
from areal.flow.trainer.checkpoint import Checkpoints

NUM_STEPS, TOKENS = 20, 3000


def issue(number: int) -> Issued:
    return Issued(number=number, environment="digits", prompt_index=number, num_samples=2, issued_version=0)


def long_turn(seed: int) -> Completion:
    rng = random.Random(seed)
    return Completion(
        uid=f"{seed}",
        prompt_ids=(1, 2, 3),
        token_ids=tuple(rng.randrange(50_000) for _ in range(TOKENS)),
        logprobs=tuple(-rng.random() for _ in range(TOKENS)),  # double precision: 10 bytes a token
        versions=(0,) * TOKENS,
        finish_reason="stop",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def filled(path: Path) -> Journal:
    """20 steps, each of which trained one group and dropped one, and a group that is open."""
    journal = Journal(path, create=True)
    journal.issued([issue(number) for number in range(2 * NUM_STEPS + 1)])
    for number in range(2 * NUM_STEPS + 1):
        parts = [make_trajectory(number, s, turns=[long_turn(10 * number + s)], reward=number) for s in (0, 1)]
        journal.finished([(number, make_prompt(number))], parts)
    for step in range(1, NUM_STEPS + 1):
        journal.dropped([2 * step - 1], step)
        journal.stepped(StepReport(step=step, version=step, groups=(2 * step - 2,), metrics={"x": step}))
    return journal


def compact(journal: Journal, oldest: int, max_bytes: int) -> int:
    calls = 1
    while journal.compact(oldest, max_bytes):
        calls += 1
        assert calls < 10_000
    return calls


def with_tokens(path: Path) -> set[int]:
    db = sqlite3.connect(path)
    rows = db.execute("SELECT group_number FROM trajectories WHERE tokens IS NOT NULL").fetchall()
    db.close()
    return {number for (number,) in rows}


def test_the_oldest_go_first_and_only_until_it_is_small_enough(path: Path) -> None:
    journal = filled(path)
    journal.checkpointed(15, "c")
    everything = range(2 * NUM_STEPS + 1)
    limit = 2 * 2**20
    compact(journal, 15, limit)
    kept = with_tokens(path)
    first = min(kept)
    assert 0 < first < 30 and kept == set(everything[first:])
    pages, free, size = journal._database.pages()
    assert limit - 100_000 < (pages - free) * size <= limit
    compact(journal, 15, 1)
    assert with_tokens(path) == set(everything[30:]), "step 16 and later may be needed again"
    journal.close()


def test_what_was_compacted_resumes_and_says_what_it_lost(path: Path) -> None:
    journal = filled(path)
    journal.checkpointed(15, "c")
    compact(journal, 15, 1)
    recovery = journal.recover()
    assert recovery.step == 15 and [group.number for group in recovery.complete] == list(range(30, 41))
    assert recovery.complete[0].trajectories[1].turns == (long_turn(301),)
    journal.close()
    view = JournalView(path)
    with pytest.raises(
        JournalError, match=r"trajectory 4/0 has lost its tokens: the journal had grown to journal.max_mb"
    ):
        view.batch(3)
    assert [step for step, _ in view.metrics()] == list(range(1, 16))
    view.close()
    db = sqlite3.connect(path)
    assert (
        db.execute("SELECT reward, num_tokens FROM trajectories WHERE group_number = 4").fetchall() == [(4, TOKENS)] * 2
    )
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_the_file_becomes_short_and_so_does_the_wal(path: Path) -> None:
    journal = filled(path)
    compact(journal, NUM_STEPS, 1)
    assert compact(journal, NUM_STEPS, 1) == 1, "nothing is left to do"
    journal.close()
    assert not path.with_name("journal.sqlite-wal").exists()
    open_group = 2 * TOKENS * 10
    assert path.stat().st_size < 3 * open_group, "of 41 groups"


def test_the_wal_of_a_long_reader_is_emptied_when_it_is_gone(path: Path) -> None:
    journal = filled(path)
    wal = path.with_name("journal.sqlite-wal")
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM groups").fetchone()
    for number in range(100, 500):
        journal.issued([issue(number)])
        journal.finished([(number, make_prompt())], [make_trajectory(number, s, turns=[long_turn(s)]) for s in (0, 1)])
    assert wal.stat().st_size > 20 * 2**20
    compact(journal, 0, 1)  # the reader is not waited for
    assert wal.stat().st_size > 20 * 2**20
    reader.close()
    compact(journal, 0, 1)
    assert wal.stat().st_size == 0
    journal.close()


def test_a_second_controller_goes_on_where_the_first_stopped(path: Path) -> None:
    journal = filled(path)
    assert journal.compact(NUM_STEPS, 1), "one call does not do everything"
    journal.close()
    journal = Journal(path, create=False)
    compact(journal, NUM_STEPS, 1)
    assert with_tokens(path) == {2 * NUM_STEPS}
    journal.close()


class Trainer:
    """Invariant: a checkpoint of it is a file."""

    def save(self, path: str) -> None:
        (Path(path) / "weights").write_text("w")

    async def finish_save(self) -> None: ...


async def test_it_happens_with_each_checkpoint_and_spares_what_the_oldest_kept_needs(path: Path) -> None:
    journal = filled(path)
    for step in (5, 10):
        journal.checkpointed(step, f"checkpoints/step-{step:08d}")
    args = (handle_of("trainer-0", Trainer()), journal, path.parent / "checkpoints")
    await Checkpoints(*args, keep=2, deadline_s=60.0).save(15)
    assert len(with_tokens(path)) == 41, "0: never"
    await Checkpoints(*args, keep=2, deadline_s=60.0, ledger_bytes=1).save(20)
    assert [step for step, _ in journal.checkpoints()] == [15, 20]
    assert with_tokens(path) == set(range(30, 41))
    journal.close()


def old_journal(path: Path, num_groups: int = 6) -> None:
    db = journal_v1.open_v1(path)
    for number in range(num_groups):
        journal_v1.issue(
            db, number, 2, '{"environment": "digits", "index": 0, "messages": [], "answer": "", "metadata": {}}'
        )
        parts = [make_trajectory(number, s, turns=[long_turn(s)], reward=0.25) for s in (0, 1)]
        journal_v1.finish(db, parts[:1] if number == 5 else parts)
    db.execute("INSERT INTO consumed VALUES (0, 1, 'trained'), (1, 1, 'stale'), (2, 2, 'trained')")
    db.execute("INSERT INTO steps VALUES (1, 1, 0.5, '{\"x\": 1}'), (2, 2, 0.5, '{\"x\": 2}')")
    db.execute("INSERT INTO checkpoints VALUES (1, 'checkpoints/1', 0.5)")
    db.close()


def test_a_journal_of_schema_1_is_brought_up_to_date(path: Path) -> None:
    old_journal(path)
    before = path.read_bytes()
    view = JournalView(path)  # whoever only reads changes nothing
    assert [t.turns for t in view.batch(2)[0].trajectories] == [(long_turn(0),), (long_turn(1),)]
    assert view.losses() == []
    view.close()
    assert path.read_bytes() == before
    journal = Journal(path, create=False)
    recovery = journal.recover()
    assert [group.number for group in recovery.complete] == [2, 3, 4]
    assert [(issued.number, missing) for issued, missing in recovery.unfinished] == [(5, (1,))]
    journal.finished([], [make_trajectory(5, 0, reward=1.0), make_trajectory(5, 1, reward=1.0)])
    assert [t.outcome.reward for t in journal.trajectories(5)] == [0.25, 1.0], "the first copy counts, also an old one"
    journal.lost("engine-3", "it was killed", 1)
    used = [pages - free for pages, free, _ in [journal._database.pages()]]
    compact(journal, 1, 1)
    used += [pages - free for pages, free, _ in [journal._database.pages()]]
    assert used[1] < 0.75 * used[0], "4 of 11 samples"
    assert [group.number for group in journal.recover().complete] == [2, 3, 4, 5]
    with pytest.raises(JournalError, match="trajectory 0/0 has lost its tokens"):
        journal.trajectories(0)
    journal.close()
    Journal(path, create=False).close()
    db = sqlite3.connect(path)
    assert db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("2",)
    assert db.execute("SELECT count(*) FROM damaged").fetchone() == (0,)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_an_update_that_is_interrupted_leaves_the_old_journal(path: Path) -> None:
    old_journal(path)
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE damaged (x)")  # in the way
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="table damaged already exists"):
        Journal(path, create=False)
    db = sqlite3.connect(path)
    assert db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("1",)
    assert "tokens" not in {row[1] for row in db.execute("PRAGMA table_info(trajectories)")}
    db.close()


def test_losses_are_kept_whatever_is_taken_back(path: Path) -> None:
    journal = Journal(path, create=True)
    journal.checkpointed(0, "c")
    journal.lost("engine-0", "signal 9", 3)
    journal.lost("rollout-12", "exit code 1\nlast line", 4)
    journal.recover()
    found = [(loss.step, loss.worker, loss.kind, loss.reason) for loss in journal.losses()]
    assert found == [
        (3, "engine-0", "engine", "signal 9"),
        (4, "rollout-12", "rollout", "exit code 1\nlast line"),
    ]
    assert journal.losses()[0].at <= journal.losses()[1].at
    journal.close()
