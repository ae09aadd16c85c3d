"""The journal's file in every bad state: one sentence, nothing deleted, and what is good is kept."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flow_samples import make_prompt, make_trajectory, make_turn

from areal.contracts.messages import StepReport
from areal.errors import JournalError
from areal.flow.buffer.database import Database
from areal.flow.buffer.journal import Issued, Journal
from areal.flow.buffer.tables import TABLES
from areal.flow.buffer.view import JournalView

NUM_GROUPS = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of 60 groups of 2 samples, of which the first 20 are trained and sealed by a checkpoint."""
    path = tmp_path / "run" / "journal.sqlite"
    path.parent.mkdir()
    journal = Journal(path, create=True)
    journal.issued([issue(number) for number in range(NUM_GROUPS)])
    for number in range(NUM_GROUPS):
        turns = [make_turn((1, 2), range(40)) for _ in range(3)]
        parts = [make_trajectory(number, sample, turns=turns) for sample in (0, 1)]
        journal.finished([(number, make_prompt(number))], parts)
    for step in range(1, 11):
        journal.stepped(StepReport(step=step, version=step, groups=(2 * step - 2, 2 * step - 1), metrics={"x": 0.5}))
    journal.checkpointed(10, "checkpoints/step-10")
    journal.close()
    return path


def issue(number: int) -> Issued:
    return Issued(number=number, environment="digits", prompt_index=number, num_samples=2, issued_version=0)


def execute(path: Path, statement: str, *values: object) -> list[Any]:
    db = sqlite3.connect(path)
    try:
        with db:
            return db.execute(statement, values).fetchall()
    finally:
        db.close()


def sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and "Traceback" not in text
    return text


@pytest.mark.parametrize("seed", range(12))
def test_random_bytes_over_pages_end_in_a_sentence_or_in_samples_made_anew(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 4))):
        place = rng.randrange(100, len(raw) - 64)
        raw[place : place + 64] = rng.randbytes(64)
    path.write_bytes(raw)
    try:
        journal = Journal(path, create=False)
    except JournalError as error:
        assert "is damaged" in sentence(error) and "nothing in it was changed" in str(error)
        assert path.read_bytes() == bytes(raw)
        return
    try:
        recovery = journal.recover()
        for group in recovery.complete:
            assert all(turn.token_ids == tuple(range(40)) for t in group.trajectories for turn in t.turns)
    except JournalError as error:
        sentence(error)
    finally:
        journal.close()


@pytest.mark.parametrize("size", [0.1, 0.5, 0.95])
def test_a_truncated_file(path: Path, size: float) -> None:
    raw = path.read_bytes()
    raw = raw[: int(len(raw) * size)]
    path.write_bytes(raw)
    with pytest.raises(
        JournalError, match=r"is damaged: .*; nothing in it was changed; put a copy of it back, or"
    ) as caught:
        Journal(path, create=False)
    assert "model.path=CHECKPOINT/model" in sentence(caught.value)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("table", TABLES)
def test_a_missing_table_is_named(path: Path, table: str) -> None:
    execute(path, f"DROP TABLE {table}")
    for opened in (lambda: Journal(path, create=False), lambda: JournalView(path)):
        with pytest.raises(JournalError, match=f"is damaged: it has no table {table};"):
            opened()


def test_damaged_samples_and_prompts_are_set_aside_and_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    execute(path, "UPDATE trajectories SET tokens = substr(tokens, 1, 9) WHERE group_number = 30 AND sample = 0")
    execute(path, "UPDATE trajectories SET body = CAST(x'80ff' AS TEXT) WHERE group_number = 31 AND sample = 1")
    execute(path, "UPDATE groups SET prompt = '{\"environment\"' WHERE number = 32")
    execute(path, "UPDATE groups SET prompt = NULL WHERE number = 33")
    execute(path, "UPDATE trajectories SET body = '?' WHERE group_number = 3")  # trained and sealed: nobody reads it
    journal = Journal(path, create=False)
    for _ in range(2):  # the second time everything is said and done
        recovery = journal.recover()
        unfinished = {issued.number: missing for issued, missing in recovery.unfinished}
        assert unfinished == {30: (0,), 31: (1,), 32: (1,), 33: (1,)}
        assert [group.number for group in recovery.complete] == [*range(20, 30), *range(34, NUM_GROUPS)]
    assert caplog.text.count("was set aside in the table damaged and is made anew") == 5
    aside = execute(path, "SELECT group_number, sample, length(CAST(body AS BLOB)), length(tokens) FROM damaged")
    assert {row[:2] for row in aside} == {(30, 0), (31, 1), (32, None), (32, 1), (33, 1)}
    assert (30, 0) in {row[:2] for row in aside if row[3] == 9}, "what could not be read is kept as it is"
    journal.finished([(30, make_prompt(30))], [make_trajectory(30, 0)])
    assert 30 in [group.number for group in journal.recover().complete]
    journal.close()


def test_a_locked_journal(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        began = time.monotonic()
        journal = Journal(path, create=False)
        with pytest.raises(
            JournalError, match=r"is locked; another process holds it .* end that, and go on with: areal"
        ):
            journal.recover()
        assert time.monotonic() - began < 15
        journal.close()
    finally:
        other.close()
    journal = Journal(path, create=False)
    assert journal.recover().step == 10
    journal.close()


FILLER = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from flow_samples import make_prompt, make_trajectory, make_turn
from areal.errors import JournalError
from areal.flow.buffer.journal import Issued, Journal

path = Path(sys.argv[1])
turn = make_turn((1,), range(4000))
journal = Journal(path, create=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 200_000,) * 2)
for number in range(60, 100_000):
    try:
        journal.issued([Issued(number=number, environment="e", prompt_index=0, num_samples=1, issued_version=0)])
        print("issued", number, flush=True)
        journal.finished([(number, make_prompt(number))], [make_trajectory(number, 0, turns=[turn])])
        print("finished", number, flush=True)
    except JournalError as error:
        print(error, flush=True)
        break
journal.close()
"""


def test_a_file_that_may_not_grow_loses_nothing_that_was_acknowledged(path: Path) -> None:
    command = [sys.executable, "-c", FILLER, str(path), str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    *said, last = ended.stdout.splitlines()
    assert "cannot be written: " in last and "nothing that was journalled is lost" in last and "areal resume" in last
    finished = [int(line.split()[1]) for line in said if line.startswith("finished")]
    assert len(finished) > 3
    journal = Journal(path, create=False)
    recovery = journal.recover()
    assert [group.number for group in recovery.complete] == [*range(20, 60), *finished]
    assert recovery.num_issued == 60 + len([line for line in said if line.startswith("issued")])
    journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_and_has_room_again(small_disk: Path) -> None:
    path = small_disk / "journal.sqlite"
    journal = Journal(path, create=True)
    journal.checkpointed(0, "0")
    finished = 0
    with pytest.raises(
        JournalError, match=r"is full; nothing that was journalled is lost; make room on its disk, and go"
    ):
        while True:
            journal.issued([issue(finished)])
            journal.finished([(finished, make_prompt())], [make_trajectory(finished, s) for s in (0, 1)])
            finished += 1
    with pytest.raises(JournalError, match="is full"):
        journal.issued([issue(finished + 1), *(issue(finished + 2 + n) for n in range(3000))])
    journal.close()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    journal = Journal(path, create=False)
    assert [group.number for group in journal.recover().complete] == list(range(finished))
    journal.published(1)
    journal.close()


def test_a_read_only_folder(small_disk: Path) -> None:
    path = small_disk / "journal.sqlite"
    journal = Journal(path, create=True)
    journal.issued([issue(0)])
    journal.checkpointed(0, "0")
    journal.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        JournalError, match=r"unable to open database file; see that its folder .* can be written, and go on"
    ):
        Journal(path, create=False).recover()
    view = JournalView(path)  # looking is allowed
    assert view.checkpoints() == [(0, "0")] and view.losses() == []
    view.close()
    with pytest.raises(JournalError, match=r"unable to open database file; .* and start anew with: areal run"):
        Journal(small_disk / "other.sqlite", create=True)


def test_a_database_that_could_not_be_opened_is_closed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        with pytest.raises(JournalError):
            Database(path, "write")
    assert len([*Path("/proc/self/fd").iterdir()]) == before
