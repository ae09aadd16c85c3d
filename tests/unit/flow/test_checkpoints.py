"""Checkpoints: whatever breaks at whatever moment, the newest one that is named is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flow_samples import handle_of

from areal.errors import JournalError, WorkerFailed
from areal.flow.buffer.journal import Journal
from areal.flow.trainer import checkpoint as checkpoint_module
from areal.flow.trainer.checkpoint import Checkpoints
from areal.flow.trainer.checksums import check


class Crash(BaseException):
    """The process is gone: nothing after this runs."""


class Trainer:
    """Writes a small checkpoint. Invariant: `saves` counts its calls."""

    def __init__(self) -> None:
        self.saves = 0
        self.failure: BaseException | None = None

    def save(self, path: str) -> None:
        self.saves += 1
        (Path(path) / "model").mkdir()
        (Path(path) / "model" / "weights").write_text(f"weights {self.saves}")
        if self.failure is not None:
            raise self.failure
        (Path(path) / "optimizer").write_text("state")

    async def finish_save(self) -> None: ...


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal.sqlite", create=True)
    yield opened
    opened.close()


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def checkpoints(trainer: Trainer, journal: Journal, tmp_path: Path) -> Checkpoints:
    return Checkpoints(handle_of("trainer-0", trainer), journal, tmp_path / "checkpoints", keep=2, deadline_s=60.0)


def whole(tmp_path: Path, journal: Journal) -> list[int]:
    """Return the steps that the journal names, each of which must be there with all its files."""
    steps = []
    for step, path in journal.checkpoints():
        assert (tmp_path / path / "model" / "weights").is_file() and (tmp_path / path / "optimizer").is_file()
        steps.append(step)
    return steps


async def test_a_checkpoint_is_named_by_a_path_that_moves_with_the_run(
    checkpoints: Checkpoints, journal: Journal, tmp_path: Path
) -> None:
    final = await checkpoints.save(7)
    assert final == tmp_path / "checkpoints" / "step-00000007"
    assert journal.checkpoints() == [(7, "checkpoints/step-00000007")]
    assert whole(tmp_path, journal) == [7]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000007"]


async def test_the_same_step_twice_is_saved_once(checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path) -> None:
    assert await checkpoints.save(3) == await checkpoints.save(3)
    assert trainer.saves == 1
    assert (tmp_path / "checkpoints/step-00000003/model/weights").read_text() == "weights 1"


async def test_the_oldest_go_and_the_pointer_goes_first(
    checkpoints: Checkpoints, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[tuple[str, list[int]]] = []
    rmtree = checkpoint_module.shutil.rmtree

    def noting(path: Path, **options: Any) -> None:
        if path.is_dir():
            removed.append((path.name, [step for step, _ in journal.checkpoints()]))
        rmtree(path, **options)

    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", noting)
    for step in (1, 2, 10, 11):
        await checkpoints.save(step)
    assert removed == [("step-00000001", [2, 10]), ("step-00000002", [10, 11])]
    assert whole(tmp_path, journal) == [10, 11]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000010", "step-00000011"]


async def test_everything_is_on_disk_before_the_pointer_moves(
    checkpoints: Checkpoints, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path / "checkpoints")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(journal, "checkpointed", lambda step, path: synced.append("pointer"))
    await checkpoints.save(1)
    inside = ["", "/checksums.json", "/model", "/model/weights", "/optimizer"]
    assert set(synced[:-2]) == {f"step-00000001.tmp{name}" for name in inside}
    assert synced[-2:] == [".", "pointer"], "the renamed entry after everything in it, and then the pointer"


@pytest.mark.parametrize(
    "moment", ["while it is written", "while it is finished", "before the rename", "after the rename", "in the journal"]
)
async def test_a_crash_leaves_the_previous_one_the_newest(
    moment: str,
    checkpoints: Checkpoints,
    trainer: Trainer,
    journal: Journal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await checkpoints.save(1)

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        match moment:
            case "while it is written":
                trainer.failure = Crash()
            case "while it is finished":
                patched.setattr(trainer, "finish_save", crash)
            case "before the rename":
                patched.setattr(Path, "rename", crash)
            case "after the rename":
                patched.setattr(checkpoint_module, "sync", lambda path: crash() if path.name == "checkpoints" else 0)
            case _:
                patched.setattr(journal, "checkpointed", crash)
        await checkpoints.save(2)
    trainer.failure = None
    assert whole(tmp_path, journal) == [1]

    # The next controller of the run saves the same step again, over whatever was left.
    again = Checkpoints(handle_of("trainer-0", trainer), journal, tmp_path / "checkpoints", keep=2, deadline_s=60.0)
    await again.save(2)
    assert whole(tmp_path, journal) == [1, 2]
    assert (tmp_path / "checkpoints/step-00000002/model/weights").read_text() == "weights 3"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


async def test_a_crash_while_old_ones_are_removed(
    checkpoints: Checkpoints, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checkpoints.save(1)
    await checkpoints.save(2)
    with monkeypatch.context() as patched, pytest.raises(Crash):
        rmtree = checkpoint_module.shutil.rmtree

        def crash_on_old(path: Path, **options: Any) -> None:
            if path.name == "step-00000001":
                raise Crash
            rmtree(path, **options)

        patched.setattr(checkpoint_module.shutil, "rmtree", crash_on_old)
        await checkpoints.save(3)
    assert whole(tmp_path, journal) == [2, 3]


async def test_a_trainer_that_fails_to_save(checkpoints: Checkpoints, trainer: Trainer, journal: Journal) -> None:
    trainer.failure = OSError(28, "No space left on device")
    with pytest.raises(WorkerFailed, match=r"trainer-0 failed in 'save': OSError: .*No space left on device"):
        await checkpoints.save(1)
    assert journal.checkpoints() == []


async def test_a_folder_that_cannot_be_written(trainer: Trainer, journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands here")
    checkpoints = Checkpoints(
        handle_of("trainer-0", trainer), journal, tmp_path / "checkpoints", keep=1, deadline_s=60.0
    )
    with pytest.raises(JournalError, match=r"checkpoint .*step-00000001 cannot be written: Not a directory"):
        await checkpoints.save(1)
    assert journal.checkpoints() == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "missing", "seal"])
async def test_a_changed_byte_is_noticed(checkpoints: Checkpoints, damage: str) -> None:
    folder = await checkpoints.save(1)
    check(folder)
    weights = folder / "model" / "weights"
    match damage:
        case "flipped":
            weights.write_text("weights 2")
        case "truncated":
            weights.write_text("weights")
        case "longer":
            weights.write_text("weights 1 and more")
        case "missing":
            weights.unlink()
        case _:
            (folder / "checksums.json").write_text("{")
    named = (
        "cannot be read: " if damage == "seal" else "is damaged: model/weights is not what was saved; put a copy back"
    )
    with pytest.raises(JournalError, match=f"checkpoint {folder} {named}"):
        check(folder)
    if damage != "seal":
        shares = [_is_damaged(folder, share) for share in range(3)]
        assert shares.count(True) == 1, "of three ranks the one whose share it is"
    (folder / "checksums.json").unlink()
    check(folder)  # an older AReaL sealed nothing


def _is_damaged(folder: Path, share: int) -> bool:
    try:
        check(folder, share, 3)
    except JournalError:
        return True
    return False


async def test_a_checkpoint_that_fails_leaves_nothing_half_written(
    checkpoints: Checkpoints, trainer: Trainer, journal: Journal, tmp_path: Path
) -> None:
    trainer.failure = JournalError("no room")
    with pytest.raises(JournalError, match=r"cannot be written: no room; see that .* and start anew with: areal run"):
        await checkpoints.save(0)
    trainer.failure = None
    await checkpoints.save(1)
    trainer.failure = JournalError("no room")
    with pytest.raises(JournalError, match=r"no room; the one before stays; see .* and go on with: areal resume"):
        await checkpoints.save(2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert whole(tmp_path, journal) == [1]
