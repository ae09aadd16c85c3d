"""The replay buffer: every group is handed out once, journalled, in order, and fresh enough; none is ever lost."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from flow_samples import make_group, make_prompt, make_trajectory, make_turn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.contracts.messages import StepReport, Trajectory
from areal.errors import JournalError
from areal.flow.buffer.buffer import MOST_PASSED_OVER, OnExcess, Order, ReplayBuffer, staleness
from areal.flow.buffer.journal import Issued, Journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal.sqlite", create=True)
    yield opened
    opened.close()


def issue(number: int, num_samples: int = 2) -> Issued:
    return Issued(number=number, environment="e", prompt_index=number, num_samples=num_samples, issued_version=0)


def make_buffer(
    journal: Journal, on_excess: OnExcess = "allow", max_staleness: int = 0, order: Order = "finished"
) -> ReplayBuffer:
    return ReplayBuffer(journal, max_staleness=max_staleness, on_excess=on_excess, order=order)


async def fill(buffer: ReplayBuffer, number: int, version: int = 0) -> None:
    buffer.put(number, make_prompt(number))
    for sample in buffer.missing(number):
        buffer.put(number, make_trajectory(number, sample, version=version))
    await asyncio.sleep(0)


def test_staleness_is_that_of_the_oldest_token() -> None:
    mixed = make_trajectory(0, 0, turns=[make_turn((1,), (2,), 7), make_turn((1, 2), (3,), 4)])
    silent = Trajectory(group=0, sample=1, turns=(), outcome=mixed.outcome)
    assert staleness(make_group(0, [mixed, make_trajectory(0, 1, version=6), silent]), 9) == 5
    assert staleness(make_group(0, [silent]), 9) == 0
    assert staleness(make_group(0, [mixed]), 2) == 0, "newer than restored weights is fresh"


async def test_a_group_is_ready_once_it_is_on_disk(journal: Journal) -> None:
    buffer = make_buffer(journal)
    buffer.expect([issue(0), issue(1)])
    buffer.put(1, make_trajectory(1, 1))
    buffer.put(1, make_trajectory(1, 0))
    assert buffer.missing(1) == () and journal.trajectories(1) == ()
    await asyncio.sleep(0)
    assert [t.sample for t in journal.trajectories(1)] == [0, 1]
    assert (buffer.num_ready, buffer.num_gathering) == (0, 2), "the prompt is still missing"
    buffer.put(1, make_prompt(1))
    await asyncio.sleep(0)
    assert (buffer.num_ready, buffer.num_gathering) == (1, 1)
    assert buffer.take(2, 0, 1) is None
    assert buffer.take(1, 0, 1) == [make_group(1, [make_trajectory(1, 0), make_trajectory(1, 1)])]
    assert buffer.take(1, 0, 1) is None


async def test_one_turn_of_the_loop_is_one_transaction(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, written = make_buffer(journal), []
    finished = journal.finished
    monkeypatch.setattr(journal, "finished", lambda p, t: (written.append((len(p), len(t))), finished(p, t)))
    buffer.expect([issue(0), issue(1)])
    await asyncio.gather(fill(buffer, 0), fill(buffer, 1))
    assert written == [(2, 4)]


async def test_stale_groups_are_journalled_even_when_the_rest_does_not_suffice(journal: Journal) -> None:
    buffer = make_buffer(journal, "drop", max_staleness=1)
    buffer.expect([issue(number) for number in range(3)])
    for number, version in enumerate((3, 1, 2)):
        await fill(buffer, number, version)
    assert buffer.take(3, 3, 4) is None
    assert (buffer.num_ready, buffer.num_stale_dropped) == (2, 1)
    assert journal._database.rows("SELECT group_number, step, fate FROM consumed") == [(1, 4, "stale")]
    assert [group.number for group in buffer.take(2, 3, 4) or []] == [0, 2]


async def test_groups_that_the_algorithm_passes_over_are_journalled_and_bounded(journal: Journal) -> None:
    buffer = ReplayBuffer(
        journal, max_staleness=0, on_excess="allow", order="finished", keep=lambda group: group.number % 2 == 1
    )
    numbers = range(2 * MOST_PASSED_OVER + 6)
    buffer.expect([issue(number) for number in numbers])
    for number in numbers[:4]:
        await fill(buffer, number)
    assert buffer.take(3, 0, 1) is None
    assert (buffer.num_ready, buffer.num_passed_over, buffer.num_dropped) == (2, 2, 2)
    assert journal._database.rows("SELECT group_number, step, fate FROM consumed") == [
        (0, 1, "passed_over"),
        (2, 1, "passed_over"),
    ]
    assert [group.number for group in buffer.collect_passed_over()] == [0, 2] and not buffer.collect_passed_over()
    await fill(buffer, 5)
    assert [group.number for group in buffer.take(3, 0, 1) or []] == [1, 3, 5]
    # Nothing but unwanted groups: after so many a step takes what there is.
    for number in numbers[6::2]:
        await fill(buffer, number)
    assert buffer.take(1, 0, 2) is None and buffer.num_ready == 0
    left = [number + 100 for number in numbers]
    buffer.expect([issue(2 * number) for number in left])
    for number in left[:MOST_PASSED_OVER]:
        await fill(buffer, 2 * number)
    taken = buffer.take(1, 0, 2) or []
    assert [group.number for group in taken] and all(group.number % 2 == 0 for group in taken)


async def test_in_the_order_issued_nobody_is_overtaken(journal: Journal) -> None:
    buffer = make_buffer(journal, order="issued")
    buffer.expect([issue(number) for number in range(4)])
    for number in (1, 2, 3):
        await fill(buffer, number)
    assert buffer.take(2, 0, 1) is None and buffer.num_ready == 3, "group 0 is slow, and it is waited for"
    await fill(buffer, 0)
    assert [group.number for group in buffer.take(2, 0, 1) or []] == [0, 1]
    assert [group.number for group in buffer.take(2, 1, 2) or []] == [2, 3]


async def test_in_the_order_issued_a_group_that_leaves_is_not_waited_for(journal: Journal) -> None:
    buffer = ReplayBuffer(journal, max_staleness=1, on_excess="drop", keep=lambda group: group.number != 1)
    buffer.expect([issue(number) for number in range(5)])
    for number, version in ((0, 0), (1, 3), (2, 3), (3, 3)):
        await fill(buffer, number, version)
    assert [group.number for group in buffer.take(2, 3, 4) or []] == [2, 3], "0 is stale, 1 is not wanted"
    assert journal._database.rows("SELECT group_number, fate FROM consumed") == [(0, "stale"), (1, "passed_over")]
    assert buffer.take(1, 4, 5) is None


@pytest.mark.parametrize("on_excess", ["mask", "allow"])
async def test_mask_and_allow_hand_out_everything(journal: Journal, on_excess: OnExcess) -> None:
    buffer = make_buffer(journal, on_excess)
    buffer.expect([issue(0)])
    await fill(buffer, 0)
    assert [group.number for group in buffer.take(1, 50, 51) or []] == [0]
    assert buffer.num_stale_dropped == 0


async def test_changed_wakes_for_arrivals_and_for_wake(journal: Journal) -> None:
    buffer = make_buffer(journal)
    buffer.expect([issue(0)])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.changed(), 0.01)
    await fill(buffer, 0)
    await asyncio.wait_for(buffer.changed(), 1)  # it arrived before anybody waited
    buffer.wake()
    await asyncio.wait_for(buffer.changed(), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.changed(), 0.01)


async def test_a_journal_that_cannot_be_written_is_told_to_who_waits(journal: Journal) -> None:
    buffer = make_buffer(journal)
    buffer.expect([issue(0)])
    journal.close()  # as a full disk would
    buffer.put(0, make_trajectory(0, 0))
    with pytest.raises(JournalError, match="cannot be written"):
        await asyncio.wait_for(buffer.changed(), 1)
    assert buffer.num_ready == 0


class BufferMachine(RuleBasedStateMachine):
    """Groups, duplicates, training steps, checkpoints and crashes in any order, compared with a plain model."""

    @initialize(
        on_excess=st.sampled_from(["drop", "mask", "allow"]),
        max_staleness=st.integers(0, 2),
        order=st.sampled_from(["issued", "finished"]),
    )
    def start(self, on_excess: str, max_staleness: int, order: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.on_excess, self.max_staleness, self.order = cast(OnExcess, on_excess), max_staleness, cast(Order, order)
        self.journal = Journal(Path(self.folder.name) / "j", create=True)
        self.journal.checkpointed(0, "0")
        self.buffer = make_buffer(self.journal, self.on_excess, max_staleness, self.order)
        self.version = self.saved = self.dropped = 0
        self.issued: dict[int, int] = {}
        self.versions: dict[int, dict[int, int]] = {}
        """Version by sample of everything written, by group."""
        self.consumed: dict[int, int] = {}
        """Step by group."""

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.folder.cleanup()
            self.loop.close()

    @rule(num_groups=st.integers(1, 3), num_samples=st.integers(1, 3))
    def expect(self, num_groups: int, num_samples: int) -> None:
        new = range(len(self.issued), len(self.issued) + num_groups)
        self.buffer.expect([issue(number, num_samples) for number in new])
        for number in new:
            self.issued[number], self.versions[number] = num_samples, {}

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), crash=st.booleans())
    def arrive(self, data: st.DataObject, crash: bool) -> None:
        """Let some samples arrive in one turn of the loop, second copies among them; or crash before it is over."""
        pairs = [(number, sample) for number, num in self.issued.items() for sample in range(num)]
        chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=6))
        ages = data.draw(st.lists(st.integers(0, self.version), min_size=len(chosen), max_size=len(chosen)))

        async def put() -> None:
            for (number, sample), version in zip(chosen, ages, strict=True):
                self.buffer.put(number, make_prompt(number))
                self.buffer.put(number, make_trajectory(number, sample, version=version))
                if number in self.open_groups():
                    assert sample not in self.buffer.missing(number)
            if not crash:
                await asyncio.sleep(0)

        coroutine = put()
        if crash:
            with pytest.raises(StopIteration):
                asyncio._set_running_loop(self.loop)
                try:
                    coroutine.send(None)
                finally:
                    asyncio._set_running_loop(None)
            self.recover()
            return
        self.loop.run_until_complete(coroutine)
        for (number, sample), version in zip(chosen, ages, strict=True):
            self.versions[number].setdefault(sample, version)

    @rule(num_groups=st.integers(1, 3))
    def train(self, num_groups: int) -> None:
        complete = [number for number in self.open_groups() if len(self.versions[number]) == self.issued[number]]
        stale = [n for n in complete if self.version - min(self.versions[n].values()) > self.max_staleness]
        if self.on_excess == "drop":
            complete = [number for number in complete if number not in stale]
            self.consumed |= dict.fromkeys(stale, self.version + 1)
            self.dropped += len(stale)
        taken = self.buffer.take(num_groups, self.version, self.version + 1)
        assert self.buffer.num_stale_dropped == self.dropped
        awaited = self.open_groups()[:num_groups] if self.order == "issued" else complete
        if len(complete) < num_groups or awaited[:num_groups] != complete[:num_groups]:
            assert taken is None
            return
        assert taken is not None
        assert [group.number for group in taken] == complete[:num_groups], "oldest first"
        for group in taken:
            assert group.trajectories == self.journal.trajectories(group.number), "only what is on disk"
            assert len(group.trajectories) == self.issued[group.number]
            assert self.on_excess != "drop" or staleness(group, self.version) <= self.max_staleness
        self.version += 1
        numbers = tuple(group.number for group in taken)
        self.journal.stepped(StepReport(step=self.version, version=self.version, groups=numbers, metrics={}))
        self.consumed |= dict.fromkeys(numbers, self.version)

    @rule()
    def checkpoint(self) -> None:
        self.saved = self.version
        self.journal.checkpointed(self.saved, str(self.saved))

    @rule()
    def recover(self) -> None:
        """Kill the controller and start another one."""
        self.journal.close()
        self.journal = Journal(Path(self.folder.name) / "j", create=False)
        recovery = self.journal.recover()
        assert recovery.step == self.saved and recovery.num_issued == len(self.issued)
        self.buffer = make_buffer(self.journal, self.on_excess, self.max_staleness, self.order)
        self.buffer.restore(recovery.complete, [issued for issued, _ in recovery.unfinished])
        self.version, self.dropped = self.saved, 0
        self.consumed = {number: step for number, step in self.consumed.items() if step <= self.saved}
        for issued, missing in recovery.unfinished:
            assert self.buffer.missing(issued.number) == missing

    def open_groups(self) -> list[int]:
        return [number for number in self.issued if number not in self.consumed]

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "buffer"):
            complete = [n for n in self.open_groups() if len(self.versions[n]) == self.issued[n]]
            assert self.buffer.num_ready == len(complete)
            assert self.buffer.num_ready + self.buffer.num_gathering + len(self.consumed) == len(self.issued)
            for number in self.open_groups():
                there = self.versions[number]
                assert self.buffer.missing(number) == tuple(s for s in range(self.issued[number]) if s not in there)


BufferMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestBufferMachine = BufferMachine.TestCase
