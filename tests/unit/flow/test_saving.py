"""Checkpoints that are finished beside the next steps: one at a time, and whole or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.cluster.inline import InlineHandle
from areal.contracts.cluster import Handle
from areal.errors import JournalError, TrainerLost
from areal.flow.buffer.journal import Journal
from areal.flow.saving import Saving
from areal.flow.tasks import TaskSet
from areal.flow.trainer.checkpoint import Checkpoints
from areal.flow.trainer.seat import TrainerSeat


class Trainer:
    """Writes one file in `save` and the other before `finish_save` returns."""

    def __init__(self) -> None:
        self.written = asyncio.Event()
        self.failure: Exception | None = None
        self.log: list[str] = []

    def save(self, path: str) -> None:
        self.log.append(f"save {Path(path).name}")
        self.path = Path(path)
        (self.path / "snapshot").write_text("s")

    async def finish_save(self) -> None:
        await self.written.wait()
        if self.failure is not None:
            raise self.failure
        (self.path / "weights").write_text("w")
        self.log.append("finished")

    async def train(self) -> None:
        self.log.append("train")


class Site:
    def __init__(self, folder: Path) -> None:
        self.trainer = Trainer()
        self.journal = Journal(folder / "journal.sqlite", create=True)
        self.seat = TrainerSeat(self.spawn)
        self.checkpoints = Checkpoints(self.seat, self.journal, folder / "checkpoints", 2, 5.0)
        self.saving = Saving(self.checkpoints)

    async def spawn(self, name: str, rank: int) -> Handle:
        return InlineHandle(name, self.trainer, lambda death: None)

    @property
    def named(self) -> list[int]:
        return [step for step, _ in self.journal.checkpoints()]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.journal.close()


async def play(site: Site, scene: Any) -> None:
    await site.seat.fill()
    async with asyncio.timeout(20):
        tasks = TaskSet()
        await tasks.run(scene(tasks))


async def test_the_trainer_goes_on_and_the_pointer_waits(site: Site, tmp_path: Path) -> None:
    async def scene(tasks: TaskSet) -> None:
        await site.saving.begin(tasks, 1)
        await site.seat.call("train")
        await asyncio.sleep(0.05)
        assert not site.named and [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001.tmp"]
        site.trainer.written.set()
        await site.saving.finished()
        assert site.named == [1]

    await play(site, scene)
    folder = tmp_path / "checkpoints" / "step-00000001"
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "snapshot", "weights"]
    assert site.trainer.log == ["save step-00000001.tmp", "train", "finished"]


async def test_the_next_one_waits_for_the_last(site: Site) -> None:
    async def scene(tasks: TaskSet) -> None:
        await site.saving.begin(tasks, 1)
        second = asyncio.create_task(site.saving.begin(tasks, 2))
        await asyncio.sleep(0.05)
        assert site.trainer.log == ["save step-00000001.tmp"]
        site.trainer.written.set()
        await second
        await site.saving.save(3)
        assert site.named == [2, 3], "keep: 2"

    await play(site, scene)
    assert site.trainer.log == [line for step in (1, 2, 3) for line in (f"save step-{step:08d}.tmp", "finished")]


async def test_a_trainer_that_is_lost_takes_its_unfinished_checkpoint_with_it(site: Site, tmp_path: Path) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.written.set()
        await site.saving.save(1)
        site.trainer.written.clear()
        await site.saving.begin(tasks, 2)
        await asyncio.sleep(0.01)
        await site.seat.lost("trainer-0", "signal 9")
        await site.saving.finished()
        assert site.named == [1]
        with pytest.raises(TrainerLost, match="signal 9"):
            await site.seat.call("train")

    await play(site, scene)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


async def test_what_cannot_be_written_ends_the_run(site: Site) -> None:
    site.trainer.failure = JournalError("no room")

    async def scene(tasks: TaskSet) -> None:
        await site.saving.begin(tasks, 1)
        site.trainer.written.set()
        await asyncio.sleep(3600)

    with pytest.raises(JournalError, match=r"checkpoint .*step-00000001 cannot be written: no room; see that its disk"):
        await play(site, scene)
    assert not site.named


async def test_a_run_that_is_stopped_in_between_leaves_the_one_before(site: Site, tmp_path: Path) -> None:
    async def scene(tasks: TaskSet) -> None:
        site.trainer.written.set()
        await site.saving.save(1)
        site.trainer.written.clear()
        await site.saving.begin(tasks, 2)

    await play(site, scene)
    assert site.named == [1]
    # The next controller writes over what was left.
    again = Checkpoints(site.seat, site.journal, tmp_path / "checkpoints", 2, 5.0)
    site.trainer.written.set()
    await again.save(2)
    assert site.named == [1, 2] and not list((tmp_path / "checkpoints").glob("*.tmp"))
