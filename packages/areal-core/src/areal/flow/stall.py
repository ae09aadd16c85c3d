"""Why nothing comes: who waits for whom, who does not answer, and what the suspects are doing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from areal.contracts.cluster import Handle
from areal.flow.buffer.buffer import ReplayBuffer
from areal.flow.engine.fleet import Fleet
from areal.flow.keeper import Kind
from areal.flow.prompts.pacing import Pacing
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew, Lease
from areal.flow.trainer.seat import TrainerSeat

PATIENCE_S = 10.0
"""For a sign of life and for the stacks; whoever is asked has been quiet for long already."""
NAMED_LEASES = 3
"""Of each worker; the oldest ones say enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What was found. Invariant: every name in `suspects` has a reason, and `stacks` has what could be read of them."""

    sentence: str
    """The chain of who waits for whom, in one line."""
    suspects: Mapping[str, str]
    """Why each worker is held responsible, by name; empty when everybody answers and works."""
    stacks: str
    is_starting: bool = False
    """Whether the trainer waits for a worker that is being started, since there is no other of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a batch comes from. Invariant: only looked at, never changed."""

    fleet: Fleet
    crew: Crew
    buffer: ReplayBuffer
    pacing: Pacing
    budget: FailureBudget
    trainer: TrainerSeat
    filling: Mapping[Kind, int]
    """Places that are to be filled, by kind; see `Keeper.filling`."""

    async def explain(self, step: int, batch_size: int, quiet_s: float) -> Stall:
        """Find out why nothing arrived for `quiet_s` seconds; takes a few times PATIENCE_S at most."""
        await self.fleet.measure_load()
        engines = {name: member.handle for name, member in self.fleet.members.items()}
        workers = engines | self.crew.members | self.crew.leaving | dict(self.trainer.ranks)
        answers = await asyncio.gather(*(handle.ping(PATIENCE_S) for handle in workers.values()))
        now = asyncio.get_running_loop().time()
        suspects = {
            name: f"{name} gave no sign of life for {PATIENCE_S:g} s"
            for name, is_alive in zip(workers, answers, strict=True)
            if not is_alive
        }
        suspects |= {
            name: f"{name} has {self.fleet.load_of(name)['running']:.0f} requests and made no token for {stuck_s:.0f} s"
            for name in engines.keys() - suspects.keys()
            if (stuck_s := self.fleet.stuck_s(name)) >= quiet_s / 2
        }
        coming = self._awaited(now)
        if not suspects and not coming:
            suspects = {
                name: f"{name} has had {_those(leases)} for {now - leases[0].renewed:.0f} s without a sample"
                for name, leases in self._overdue(now, quiet_s).items()
            }
        reasons = [*suspects.values(), *coming]
        return Stall(
            sentence=self._sentence(step, batch_size, quiet_s, reasons),
            suspects=suspects,
            stacks=await _stacks({name: handle for name, handle in workers.items() if name in suspects}),
            is_starting=bool(coming),
        )

    def _awaited(self, now: float) -> list[str]:
        """Who is being started, or about to be, where nobody of the kind is at work."""
        coming: dict[str, float] = {}
        about_to: list[str] = []
        if not self.fleet.num_serving:
            coming |= self.fleet.coming | {name: now for name, m in self.fleet.members.items() if not m.serving}
            about_to += ["engine"] if self.filling.get("engine") and not coming else []
        if not self.crew.members:
            coming |= self.crew.coming
            about_to += ["rollout worker"] if self.filling.get("rollout") and not self.crew.coming else []
        return [f"{name} has been starting for {now - since:.0f} s" for name, since in coming.items()] + [
            f"another {kind} is about to be started" for kind in about_to
        ]

    def _overdue(self, now: float, quiet_s: float) -> dict[str, list[Lease]]:
        """Leases that nothing renewed for so long, oldest first, by worker."""
        overdue: dict[str, list[Lease]] = {}
        for lease in sorted(self.crew.leases.values(), key=lambda lease: lease.renewed):
            if now - lease.renewed >= quiet_s:
                overdue.setdefault(lease.worker, []).append(lease)
        return overdue

    def _sentence(self, step: int, batch_size: int, quiet_s: float, reasons: Sequence[str]) -> str:
        chain = [
            f"the trainer waited {quiet_s:g} s for {batch_size} groups of step {step} and nothing arrived: "
            f"{self.buffer.num_ready} are ready",
            f"{self.buffer.num_gathering} are being made",
            f"{self.pacing.num_free} more may be issued",
            f"{self.fleet.num_serving} of {len(self.fleet.members)} engines serve "
            f"{len(self.crew.members)} rollout workers",
        ]
        if failures := self.budget.said:
            chain.append(failures)
        return "; ".join([*chain, *(reasons or ["all workers answer"])])


def _those(leases: list[Lease]) -> str:
    named = ", ".join(f"group {lease.group} ({lease.num_missing} missing)" for lease in islice(leases, NAMED_LEASES))
    more = len(leases) - NAMED_LEASES
    return f"{named} and {more} more" if more > 0 else named


async def _stacks(handles: Mapping[str, Handle]) -> str:
    found = await asyncio.gather(*(handle.stacks(PATIENCE_S) for handle in handles.values()))
    return "\n\n".join(f"==== {name}\n{text}" for name, text in zip(handles, found, strict=True))
