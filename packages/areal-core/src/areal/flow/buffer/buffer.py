"""The replay buffer: finished groups between rollout and trainer, with the staleness law at its door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from areal.contracts.messages import Group, Prompt, Trajectory, Version
from areal.flow.buffer.journal import Fate, Issued, Journal
from areal.flow.buffer.shelf import Order, Shelf
from areal.flow.buffer.size import prompt_bytes, trajectory_bytes

OnExcess = Literal["drop", "mask", "allow"]

MOST_PASSED_OVER = 8
"""Groups passed over for each group of a step; beyond it a step takes what there is, so that a policy that always or
never succeeds does not sample for ever."""


def staleness(group: Group, version: Version) -> int:
    """Return consumer's version minus the version of the group's oldest sampled token, at least 0.

    After a resume, finished samples may be newer than the restored weights; they count as fresh.
    """
    oldest = _oldest(group)
    return 0 if oldest is None else max(0, version - oldest)


def _oldest(group: Group) -> Version | None:
    """Return the oldest weights among the group's sampled tokens, or None when it has no tokens."""
    return min((t.min_version for t in group.trajectories if t.min_version is not None), default=None)


@dataclass(slots=True)
class _Gathering:
    """A group on its way. Invariant: `trajectories` has at most one entry a sample, and `seen` names them all."""

    issued: Issued
    prompt: Prompt | None = None
    trajectories: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    seen: set[int] = field(default_factory=set[int])
    """Samples that have arrived, written or not."""
    num_bytes: int = 0

    @property
    def complete(self) -> bool:
        return self.prompt is not None and len(self.trajectories) == self.issued.num_samples

    def take(self, part: Prompt | Trajectory) -> int:
        """Keep a part that is not here yet; return by how many bytes this grew."""
        if isinstance(part, Prompt):
            grown = 0 if self.prompt is not None else prompt_bytes(part)
            self.prompt = part
        else:
            grown = 0 if part.sample in self.trajectories else trajectory_bytes(part)
            self.trajectories.setdefault(part.sample, part)
            self.seen.add(part.sample)
        self.num_bytes += grown
        return grown

    def group(self) -> Group:
        """Return the complete group."""
        assert self.prompt is not None
        ordered = tuple(self.trajectories[sample] for sample in sorted(self.trajectories))
        return Group(number=self.issued.number, prompt=self.prompt, trajectories=ordered)


class ReplayBuffer:
    """Invariant: a group is handed out at most once, only after the journal has all of it.

    In the order ``issued`` a group is never overtaken by a later one. In the order ``finished`` a step takes the oldest
    groups that are complete, so short answers come before long ones, which may be too old when their turn comes.

    With ``on_excess`` drop, no group handed out exceeds the bound: it is journalled as stale and counted instead.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        max_staleness: int,
        on_excess: OnExcess,
        order: Order = "issued",
        keep: Callable[[Group], bool] | None = None,
    ) -> None:
        """`keep`: whether the algorithm wants a finished group; None: all of them."""
        self._journal = journal
        self._max_staleness = max_staleness
        self._on_excess: OnExcess = on_excess
        self._gathering: dict[int, _Gathering] = {}
        self._ready = Shelf(order)
        self._sizes: dict[int, int] = {}
        """Bytes of each ready group."""
        self._arrived: list[tuple[int, Prompt | Trajectory]] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._keep = keep
        self._unasked: list[int] = []
        self._unwanted: list[int] = []
        """A heap of groups that the algorithm does not want; one that is not ready any more has left."""
        self._passed_over: list[Group] = []
        self._num_passed_over_now = 0
        self.num_stale_dropped = 0
        self.num_passed_over = 0
        self.num_arrived = 0
        """Samples since the start."""
        self.num_bytes = 0
        """Memory that ready and gathering groups hold, estimated from their lengths."""

    def expect(self, groups: Sequence[Issued]) -> None:
        """Journal that these groups were handed out; their trajectories may arrive from now on."""
        self._journal.issued(groups)
        for issued in groups:
            self._gathering[issued.number] = _Gathering(issued)
            self._ready.announce(issued.number)

    def restore(self, complete: Sequence[Group], unfinished: Sequence[Issued] = ()) -> None:
        """Take over what no kept step consumed; nothing here is journalled anew.

        After a resume that is all an earlier controller left. In the middle of a run, which has gone back to a
        checkpoint, it is what later steps had taken; what is here already stays as it is.
        """
        for group in complete:
            if group.number not in self._ready:
                num_bytes = prompt_bytes(group.prompt) + sum(map(trajectory_bytes, group.trajectories))
                self.num_bytes += num_bytes
                self._make_ready(group, num_bytes)
        for issued in unfinished:
            gathering = self._gathering[issued.number] = _Gathering(issued)
            self._ready.announce(issued.number)
            for known in self._journal.trajectories(issued.number):
                self.num_bytes += gathering.take(known)
        self._changed.set()

    def put(self, number: int, part: Prompt | Trajectory) -> None:
        """Take a prompt or a trajectory of a group; it counts once `flush` has written it."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._flush_soon)
        self._arrived.append((number, part))
        if isinstance(part, Trajectory) and (gathering := self._gathering.get(number)):
            gathering.seen.add(part.sample)

    def _flush_soon(self) -> None:
        try:
            self.flush()
        except Exception as error:
            # Nobody hears what the event loop calls; whoever waits for the data does.
            self._failure = error
            self._changed.set()

    def flush(self) -> None:
        """Journal everything that arrived in one transaction, then make complete groups ready."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        self._journal.finished(
            [(number, part) for number, part in arrived if isinstance(part, Prompt)],
            [part for _, part in arrived if isinstance(part, Trajectory)],
        )
        for number, part in arrived:
            self.num_arrived += isinstance(part, Trajectory)
            self._accept(number, part)
        self._changed.set()

    def _accept(self, number: int, part: Prompt | Trajectory) -> None:
        gathering = self._gathering.get(number)
        if gathering is None:
            return  # a second copy of something finished long ago; the journal ignored it too
        self.num_bytes += gathering.take(part)
        if gathering.complete:
            del self._gathering[number]
            self._make_ready(gathering.group(), gathering.num_bytes)

    def _make_ready(self, group: Group, num_bytes: int) -> None:
        self._ready.add(group, _oldest(group))
        self._sizes[group.number] = num_bytes
        if self._keep is not None:
            self._unasked.append(group.number)

    def _leave(self, number: int) -> Group:
        self.num_bytes -= self._sizes.pop(number)
        return self._ready.pop(number)

    def missing(self, number: int) -> tuple[int, ...]:
        """Return the samples of an unfinished group that have not arrived; empty for a finished one."""
        gathering = self._gathering.get(number)
        if gathering is None:
            return ()
        return tuple(sample for sample in range(gathering.issued.num_samples) if sample not in gathering.seen)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_gathering(self) -> int:
        return len(self._gathering)

    def wake(self) -> None:
        """End the current wait of `changed` although nothing arrived."""
        self._changed.set()

    async def changed(self) -> None:
        """Return after something arrived that was not there at the last call, or after `wake`.

        Raises JournalError when what arrived could not be written.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def collect_passed_over(self) -> list[Group]:
        """Return the groups passed over since the last call."""
        collected, self._passed_over = self._passed_over, []
        return collected

    @property
    def num_dropped(self) -> int:
        """Groups that left untrained, for whatever reason."""
        return self.num_stale_dropped + self.num_passed_over

    def take(self, num_groups: int, version: Version, step: int) -> list[Group] | None:
        """Return the next `num_groups` for `step` on weights `version`, or None while they are not complete.

        Stale groups leave here under ``drop``, whether or not the rest suffices, and so do those passed over.
        """
        if self._on_excess == "drop":
            self._drop_stale(version, step)
        self._pass_over(num_groups, step)
        wanted = self._ready.first(num_groups)
        if wanted is None:
            return None
        self._num_passed_over_now = 0
        return [self._leave(number) for number in wanted]

    def _drop_stale(self, version: Version, step: int) -> None:
        stale = self._ready.older_than(version - self._max_staleness)
        self._drop(stale, step, "stale")
        self.num_stale_dropped += len(stale)

    def _pass_over(self, num_groups: int, step: int) -> None:
        if self._keep is None:
            return
        # Each group is asked about once; `take` runs whenever something arrives.
        asked, self._unasked = self._unasked, []
        for number in asked:
            if number in self._ready and not self._keep(self._ready[number]):
                heappush(self._unwanted, number)
        most = MOST_PASSED_OVER * num_groups - self._num_passed_over_now
        passed: list[int] = []
        while self._unwanted and len(passed) < most:
            number = heappop(self._unwanted)
            if number in self._ready:
                passed.append(number)
        self._passed_over += [self._ready[number] for number in passed]
        self._drop(passed, step, "passed_over")
        self._num_passed_over_now += len(passed)
        self.num_passed_over += len(passed)

    def _drop(self, numbers: Sequence[int], step: int, fate: Fate) -> None:
        if numbers:
            self._journal.dropped(numbers, step, fate)
            for number in numbers:
                self._leave(number)
