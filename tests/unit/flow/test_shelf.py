"""The shelf and the size of what lies on it, compared with the plainest way to say the same."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from pathlib import Path

from flow_samples import make_group, make_prompt, make_trajectory, make_turn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from areal.flow.buffer.buffer import ReplayBuffer
from areal.flow.buffer.journal import Issued, Journal
from areal.flow.buffer.shelf import Shelf
from areal.flow.buffer.size import prompt_bytes, trajectory_bytes


class ShelfMachine(RuleBasedStateMachine):
    """Groups are announced, finished and taken in any order; `first` is what sorting everything would say."""

    @initialize(order=st.sampled_from(["issued", "finished"]))
    def start(self, order: str) -> None:
        self.order = order
        self.shelf = Shelf(order)  # type: ignore[arg-type]
        self.open: set[int] = set()
        self.ready: dict[int, int | None] = {}
        self.known: set[int] = set()

    @rule(number=st.integers(0, 30))
    def announce(self, number: int) -> None:
        if number not in self.known:
            self.known.add(number)
            self.open.add(number)
            self.shelf.announce(number)

    @rule(data=st.data(), oldest=st.none() | st.integers(0, 4))
    def finish(self, data: st.DataObject, oldest: int | None) -> None:
        if self.open:
            number = data.draw(st.sampled_from(sorted(self.open)))
            self.open.discard(number)
            self.ready[number] = oldest
            self.shelf.add(make_group(number, []), oldest)

    @rule(number=st.integers(0, 40))
    def restore(self, number: int) -> None:
        """Finished in an earlier life of the run, or taken by a step that the run has gone back behind."""
        if number not in self.open and number not in self.ready:
            self.known.add(number)
            self.ready[number] = None
            self.shelf.add(make_group(number, []), None)

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        if self.ready:
            number = data.draw(st.sampled_from(sorted(self.ready)))
            del self.ready[number]
            assert self.shelf.pop(number).number == number and number not in self.shelf

    @rule(num_groups=st.integers(1, 5), version=st.integers(0, 5))
    def look(self, num_groups: int, version: int) -> None:
        awaited = sorted(self.ready.keys() | (self.open if self.order == "issued" else set()))[:num_groups]
        complete = len(awaited) == num_groups and all(number in self.ready for number in awaited)
        assert self.shelf.first(num_groups) == (awaited if complete else None)
        old = [number for number, oldest in sorted(self.ready.items()) if oldest is not None and oldest < version]
        assert self.shelf.older_than(version) == old

    @invariant()
    def size(self) -> None:
        if hasattr(self, "shelf"):
            assert len(self.shelf) == len(self.ready)


ShelfMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestShelf = ShelfMachine.TestCase


def test_the_estimate_is_near_what_trajectories_from_another_process_hold() -> None:
    prompt = tuple(range(2000, 2400))
    for num_tokens in (0, 40, 2000):
        turn = make_turn(prompt, range(1000, 1000 + num_tokens), 3)
        # Each one travels by itself.
        travelled = [pickle.dumps(make_trajectory(0, sample, turns=[turn])) for sample in range(100)]
        gc.collect()
        tracemalloc.start()
        trajectories = [pickle.loads(data) for data in travelled]
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        said = sum(map(trajectory_bytes, trajectories))
        assert 0.75 < said / held < 1.35, (num_tokens, said, held)


async def test_the_buffer_counts_what_it_holds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", create=True)
    buffer = ReplayBuffer(journal, max_staleness=0, on_excess="drop")
    buffer.expect(
        [Issued(number=n, environment="e", prompt_index=n, num_samples=2, issued_version=0) for n in range(3)]
    )
    assert buffer.num_bytes == 0
    parts = {n: [make_trajectory(n, sample, version=n) for sample in range(2)] for n in range(3)}
    sizes = {n: prompt_bytes(make_prompt(n)) + sum(map(trajectory_bytes, parts[n])) for n in range(3)}
    for number, trajectories in parts.items():
        buffer.put(number, make_prompt(number))
        for trajectory in [*trajectories[: 1 if number == 2 else 2], trajectories[0]]:
            buffer.put(number, trajectory)
    buffer.flush()
    half = prompt_bytes(make_prompt(2)) + trajectory_bytes(parts[2][0])
    assert buffer.num_bytes == sizes[0] + sizes[1] + half, "second copies count once"
    assert buffer.take(1, 1, 2) is not None and buffer.num_stale_dropped == 1
    assert buffer.num_bytes == half
    restored = ReplayBuffer(journal, max_staleness=0, on_excess="drop")
    restored.restore(
        [make_group(1, parts[1])], [Issued(number=2, environment="e", prompt_index=2, num_samples=2, issued_version=0)]
    )
    assert restored.num_bytes == sizes[1] + trajectory_bytes(parts[2][0])
    journal.close()
