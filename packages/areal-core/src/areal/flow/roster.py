"""Who works for a run, as `areal workers list` shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from areal.flow.engine.fleet import Fleet
from areal.flow.rollout.crew import Crew
from areal.flow.trainer.seat import TrainerSeat


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker at one moment. Invariant: one that is `starting` has no process to name yet."""

    name: str
    kind: str
    state: str
    """``starting``, ``working``, ``leaving``; of an engine ``joining`` (waits for its first weights) or ``serving``."""
    pid: int = 0
    node: str = ""
    work: str = ""
    """What it is doing, in a few words."""


def rows(fleet: Fleet, crew: Crew, seat: TrainerSeat) -> list[WorkerRow]:
    """Return a row for everybody, engines first."""
    return [*_engines(fleet), *_rollouts(crew), *_trainer(seat)]


def _engines(fleet: Fleet) -> Iterator[WorkerRow]:
    for name, member in fleet.members.items():
        handle, load = member.handle, fleet.load_of(name)
        work = (
            f"{load['running']:.0f} requests running, {load.get('waiting', 0.0):.0f} waiting"
            if "running" in load
            else ""
        )
        state = "serving" if member.serving else "joining"
        yield WorkerRow(name=name, kind="engine", state=state, pid=handle.pid, node=handle.node, work=work)
    for name, since in fleet.coming.items():
        yield WorkerRow(name=name, kind="engine", state="starting", work=_for(since))


def _rollouts(crew: Crew) -> Iterator[WorkerRow]:
    for state, handles in (("working", crew.members), ("leaving", crew.leaving)):
        for name, handle in handles.items():
            work = f"{crew.num_leased(name)} groups"
            yield WorkerRow(name=name, kind="rollout", state=state, pid=handle.pid, node=handle.node, work=work)
    for name, since in crew.coming.items():
        yield WorkerRow(name=name, kind="rollout", state="starting", work=_for(since))


def _trainer(seat: TrainerSeat) -> Iterator[WorkerRow]:
    if not seat.ranks:
        yield WorkerRow(name=seat.name, kind="trainer", state="starting")
    for rank, (name, handle) in enumerate(seat.ranks.items()):
        work = f"rank {rank} of {len(seat.ranks)}" if len(seat.ranks) > 1 else ""
        yield WorkerRow(name=name, kind="trainer", state="working", pid=handle.pid, node=handle.node, work=work)


def _for(since: float) -> str:
    return f"for {asyncio.get_running_loop().time() - since:.0f} s"
