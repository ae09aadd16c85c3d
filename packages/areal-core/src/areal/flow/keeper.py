"""Workers come and go: the keeper replaces what is lost, ends what hangs, and adds or releases what it is asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from areal.contracts.cluster import Cluster, Handle
from areal.errors import ConfigError, WorkerFailed, did_you_mean
from areal.flow.engine.fleet import Fleet
from areal.flow.restarts import Restarts, Turn
from areal.flow.rollout.crew import Crew
from areal.flow.roster import WorkerRow, rows
from areal.flow.tasks import TaskSet
from areal.flow.trainer.seat import TrainerSeat

Kind = Literal["engine", "rollout"]
"""Kinds of workers whose number may change while a run goes on, called as their blocks in the recipe."""

WAITED_OUT = 0.95
"""Share of the patience after which silence is silence; clocks are read at slightly different moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many workers of a kind a run may have. Invariant: `fewest` <= `wanted` <= `most`."""

    fewest: int
    """The run goes on with so many; with fewer, a place that cannot be filled counts as a loss."""
    wanted: int
    """At the start."""
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """Invariant: every worker is asked for a sign of life at least twice in `hang_timeout_s`."""

    hang_timeout_s: float
    """A worker that gives no sign of life, or an engine that has requests and makes no token, for so long is lost."""
    bounds: Mapping[Kind, Bounds]


class Listener(Protocol):
    """Who hears of workers. Invariant: no call waits."""

    def replaced(self, name: str, reason: str) -> None: ...

    def warned(self, sentence: str) -> None: ...


class Ledger(Protocol):
    """The journal as the keeper sees it. Invariant: `lost` is durable when it returns."""

    def lost(self, worker: str, reason: str, step: int) -> None: ...


class Keeper:
    """Invariant: a worker that ends has a successor on its way, was asked to leave, or ends the run with a report."""

    def __init__(
        self,
        settings: KeeperSettings,
        *,
        cluster: Cluster,
        seat: TrainerSeat,
        fleet: Fleet,
        crew: Crew,
        restarts: Restarts,
        ledger: Ledger,
        listener: Listener,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._seat = seat
        self._fleet = fleet
        self._crew = crew
        self._restarts = restarts
        self._ledger = ledger
        self._listener = listener
        self._tasks: TaskSet
        self._changed: Callable[[], None]
        self._wanted: dict[Kind, int] = {kind: bounds.wanted for kind, bounds in settings.bounds.items()}
        self.filling: dict[Kind, int] = dict.fromkeys(settings.bounds, 0)
        """Places of each kind that are to be filled: somebody is starting, or about to be started."""
        self._trainer_turn: Turn | None = None
        """While the trainer's seat is to be filled."""
        self.step = 0
        """The run's step, for the ledger."""

    def start(self, tasks: TaskSet, changed: Callable[[], None]) -> None:
        """Watch until the tasks end; `changed` is called when somebody who waits should look again."""
        self._tasks = tasks
        self._changed = changed
        for name in [*self._fleet.members, *self._crew.members, self._seat.name]:
            self._restarts.born(name)
        for kind, wanted in self._wanted.items():
            for _ in range(wanted - len(self._members(kind))):
                tasks.start(self._fill(kind, Turn(quick=1, pause_s=0.0)))
        tasks.start(self._watch_forever())
        tasks.start(self._ping_forever())

    # what is lost

    async def _watch_forever(self) -> None:
        """Waits for deaths, which the cluster reports."""
        async for death in self._cluster.watch():
            await self.lost(death.name, death.reason)

    async def lost(self, name: str, reason: str) -> None:
        """Take a broken worker out and have it replaced; whoever hears of it second changes nothing.

        A worker that died while it started, or was asked to leave, is nobody's: whoever started it has the error.
        """
        if await self._fleet.lost(name):
            self._replace("engine", name, reason)
        elif await self._crew.lost(name):
            self._replace("rollout", name, reason)
        elif await self._seat.lost(name, reason):
            self._changed()  # whoever uses the trainer next goes back to the newest checkpoint

    def _replace(self, kind: Kind, name: str, reason: str) -> None:
        self._ledger.lost(name, reason, self.step)
        turn = self._restarts.lost(name, reason)
        self._listener.replaced(name, reason)
        self._tasks.start(self._fill(kind, turn))

    async def trainer_lost(self, reason: str) -> None:
        """Count the trainer's loss and wait until another one may be started; WorkerFailed when it is one too many."""
        name = self._seat.culprit
        self._ledger.lost(name, reason, self.step)
        if self._trainer_turn is None:
            self._trainer_turn = self._restarts.lost(self._seat.name, reason)
        else:  # its successor did not even come to work
            self._trainer_turn = self._restarts.failed(self._trainer_turn, self._seat.name, reason, counts=True)
        self._listener.replaced(name, reason)
        await asyncio.sleep(self._trainer_turn.pause_s)

    @property
    def num_lost(self) -> int:
        """Workers lost since the start."""
        return self._restarts.num_lost

    def trainer_started(self) -> None:
        """The trainer in the seat is where its predecessor's checkpoint was."""
        quick = self._trainer_turn.quick if self._trainer_turn else 0
        self._restarts.born(self._seat.name, quick)
        self._trainer_turn = None

    async def _fill(self, kind: Kind, turn: Turn) -> None:
        """Start a worker in a free place, again and again until it works or nobody wants it any more."""
        self.filling[kind] += 1
        try:
            await self._try_to_fill(kind, turn)
        finally:
            self.filling[kind] -= 1

    async def _try_to_fill(self, kind: Kind, turn: Turn) -> None:
        while len(self._members(kind)) < self._wanted[kind]:
            await asyncio.sleep(turn.pause_s)
            try:
                name = await self._add(kind)
            except WorkerFailed as error:
                counts = len(self._members(kind)) < self._settings.bounds[kind].fewest
                turn = self._restarts.failed(turn, f"a new {kind}", str(error), counts=counts)
                self._listener.warned(f"another {kind} could not be started, next try in {turn.pause_s:g} s: {error}")
                continue
            self._restarts.born(name, turn.quick)
            return

    async def _add(self, kind: Kind) -> str:
        name = await (self._fleet.add() if kind == "engine" else self._crew.add())
        self._changed()  # an engine waits for its first weights
        return name

    # what hangs

    async def _ping_forever(self) -> None:
        """Ask everybody for a sign of life, twice in a hang's time."""
        while True:
            await asyncio.sleep(self._settings.hang_timeout_s / 2)
            await self._fleet.measure_load()
            await asyncio.gather(*(self._check(name, handle) for name, handle in self._handles().items()))

    async def _check(self, name: str, handle: Handle) -> None:
        if hangs := await self.hangs(name, handle, self._settings.hang_timeout_s):
            await self.lost(name, hangs)  # before its end is noticed, whose reason says less

    async def hangs(self, name: str, handle: Handle, patience_s: float) -> str:
        """Return why a worker hangs, or an empty string; takes `patience_s` at most."""
        stuck_s = self._fleet.stuck_s(name)
        if stuck_s >= self._settings.hang_timeout_s:
            return f"{name} has had requests and has made no token for {stuck_s:.0f} s"
        asked_at = asyncio.get_running_loop().time()
        answered = await handle.ping(patience_s)
        waited_s = asyncio.get_running_loop().time() - asked_at
        if not answered and waited_s >= patience_s * WAITED_OUT:  # refused sooner: it is dead, and that is reported
            return f"{name} gave no sign of life for {patience_s:g} s"
        return ""

    def _handles(self) -> dict[str, Handle]:
        """Everybody who can be asked."""
        engines = {name: member.handle for name, member in self._fleet.members.items()}
        return engines | self._crew.members | self._crew.leaving | dict(self._seat.ranks)

    # who is asked to come or to leave

    def _members(self, kind: Kind) -> Mapping[str, object]:
        return self._fleet.members if kind == "engine" else self._crew.members

    async def add(self, kind: Kind) -> str:
        """Start one more worker and return its name; ConfigError above the recipe's most, WorkerFailed."""
        most = self._settings.bounds[kind].most
        if self._wanted[kind] >= most:
            raise ConfigError(f"one more {kind} was asked for and the recipe allows {most}; raise {kind}.max")
        self._wanted[kind] += 1
        try:
            name = await self._add(kind)
        except BaseException:
            self._wanted[kind] -= 1
            raise
        self._restarts.born(name)
        return name

    async def remove(self, name: str) -> None:
        """Let a worker go; its unfinished work goes on elsewhere. ConfigError below the recipe's fewest."""
        kind: Kind | None = next((kind for kind in self._wanted if name in self._members(kind)), None)
        if name in self._seat.ranks:
            raise ConfigError(
                f"{name} belongs to the trainer, without which no run goes on; only engines and rollout workers leave"
            )
        if kind is None:
            there = sorted([*self._fleet.members, *self._crew.members])
            raise ConfigError(
                f"no engine or rollout worker is called {name!r}; there are {', '.join(there)}"
                f"{did_you_mean(name, there)}"
            )
        fewest = self._settings.bounds[kind].fewest
        if self._wanted[kind] <= fewest:
            raise ConfigError(
                f"{name} was to leave and the recipe asks for at least {fewest} of its kind; lower {kind}.min"
            )
        if (there := self._num_at_work(kind)) <= fewest:
            raise ConfigError(
                f"{name} was to leave and only {there} of its kind is at work now; try again when others have started"
            )
        self._wanted[kind] -= 1
        release: Callable[[str], Awaitable[None]] = self._fleet.release if kind == "engine" else self._crew.release
        await release(name)

    def _num_at_work(self, kind: Kind) -> int:
        return self._fleet.num_serving if kind == "engine" else len(self._crew.members)

    async def rows(self) -> list[WorkerRow]:
        """Return who is there, who is coming and leaving, and what they are doing."""
        await self._fleet.measure_load()
        return rows(self._fleet, self._crew, self._seat)
