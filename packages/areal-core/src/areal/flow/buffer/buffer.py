"""The replay buffer: finished groups between rollout and trainer, with the staleness law at its door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Literal

from areal.contracts.messages import Group, Prompt, Trajectory, Version
from areal.flow.buffer.journal import Fate, Issued, Journal

OnExcess = Literal["drop", "mask", "allow"]
Order = Literal["issued", "finished"]

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
    """A group on its way. Invariant: `trajectories` has at most one entry a sample."""

    issued: Issued
    prompt: Prompt | None = None
    trajectories: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])

    @property
    def complete(self) -> bool:
        return self.prompt is not None and len(self.trajectories) == self.issued.num_samples


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
        self._order: Order = order
        self._gathering: dict[int, _Gathering] = {}
        self._ready: dict[int, Group] = {}
        self._oldest: dict[int, Version | None] = {}
        """Of each ready group: `take` asks for it whenever something arrives, and tokens are many."""
        self._arrived: list[tuple[int, Prompt | Trajectory]] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._keep = keep
        self._wanted: set[int] = set()
        self._passed_over: list[Group] = []
        self._num_passed_over_now = 0
        self.num_stale_dropped = 0
        self.num_passed_over = 0

    def expect(self, groups: Sequence[Issued]) -> None:
        """Journal that these groups were handed out; their trajectories may arrive from now on."""
        self._journal.issued(groups)
        self._gathering |= {issued.number: _Gathering(issued) for issued in groups}

    def restore(self, complete: Sequence[Group], unfinished: Sequence[Issued]) -> None:
        """Take over what an earlier controller left: nothing here is journalled anew."""
        for group in complete:
            self._make_ready(group)
        for issued in unfinished:
            known = {t.sample: t for t in self._journal.trajectories(issued.number)}
            self._gathering[issued.number] = _Gathering(issued, trajectories=known)
        self._changed.set()

    def rewind(self, complete: Sequence[Group]) -> None:
        """Make groups ready again that steps had taken which the trainer, gone back to a checkpoint, knows nothing of.

        `complete`: all complete groups that no kept step consumed; those that are here already stay as they are.
        """
        for group in complete:
            if group.number not in self._ready:
                self._make_ready(group)
        self._changed.set()

    def put(self, number: int, part: Prompt | Trajectory) -> None:
        """Take a prompt or a trajectory of a group; it counts once `flush` has written it."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._flush_soon)
        self._arrived.append((number, part))

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
            self._accept(number, part)
        self._changed.set()

    def _accept(self, number: int, part: Prompt | Trajectory) -> None:
        gathering = self._gathering.get(number)
        if gathering is None:
            return  # a second copy of something finished long ago; the journal ignored it too
        if isinstance(part, Prompt):
            gathering.prompt = part
        else:
            gathering.trajectories.setdefault(part.sample, part)
        if gathering.complete and gathering.prompt is not None:
            del self._gathering[number]
            ordered = tuple(gathering.trajectories[sample] for sample in sorted(gathering.trajectories))
            self._make_ready(Group(number=number, prompt=gathering.prompt, trajectories=ordered))

    def _make_ready(self, group: Group) -> None:
        self._ready[group.number], self._oldest[group.number] = group, _oldest(group)

    def _leave(self, number: int) -> Group:
        self._wanted.discard(number)
        del self._oldest[number]
        return self._ready.pop(number)

    def missing(self, number: int) -> tuple[int, ...]:
        """Return the samples of an unfinished group that have not arrived; empty for a finished one."""
        gathering = self._gathering.get(number)
        if gathering is None:
            return ()
        there = {part.sample for n, part in self._arrived if n == number and isinstance(part, Trajectory)}
        there |= gathering.trajectories.keys()
        return tuple(sample for sample in range(gathering.issued.num_samples) if sample not in there)

    num_bytes = 0

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
        issued = [*self._ready, *self._gathering] if self._order == "issued" else self._ready
        wanted = nsmallest(num_groups, issued)
        if len(wanted) < num_groups or any(number in self._gathering for number in wanted):
            return None
        self._num_passed_over_now = 0
        return [self._leave(number) for number in wanted]

    def _drop_stale(self, version: Version, step: int) -> None:
        oldest = version - self._max_staleness
        stale = [number for number, found in self._oldest.items() if found is not None and found < oldest]
        self._drop(stale, step, "stale")
        self.num_stale_dropped += len(stale)

    def _pass_over(self, num_groups: int, step: int) -> None:
        if self._keep is None:
            return
        # Each group is asked about once; `take` runs whenever something arrives.
        asked = [number for number in sorted(self._ready) if number not in self._wanted]
        self._wanted |= {number for number in asked if self._keep(self._ready[number])}
        most = MOST_PASSED_OVER * num_groups - self._num_passed_over_now
        unwanted = [number for number in asked if number not in self._wanted][:most]
        self._passed_over += [self._ready[number] for number in unwanted]
        self._drop(unwanted, step, "passed_over")
        self._num_passed_over_now += len(unwanted)
        self.num_passed_over += len(unwanted)

    def _drop(self, numbers: Sequence[int], step: int, fate: Fate) -> None:
        if numbers:
            self._journal.dropped(numbers, step, fate)
            for number in numbers:
                self._leave(number)
