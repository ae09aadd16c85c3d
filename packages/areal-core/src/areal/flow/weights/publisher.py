"""prepare -> transfer -> verify -> commit: how a version reaches the engines.

sender      send(stage) ─────┐
engines     receive(stage) ──┤ side by side, generation goes on
publisher                    └─► compare checksums
engines     pause ─ receive(commit) ─ resume        each on its own, resume whatever happened
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.contracts.cluster import Handle
from areal.contracts.component import Component
from areal.contracts.messages import Version
from areal.contracts.resharder import Resharder
from areal.contracts.transfer import Layout, Phase, Plan, Receipt, Transfer
from areal.errors import TransferFailed, WorkerFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that is to get a version. Invariant: `handle` and `layout` belong to the same process."""

    name: str
    handle: Handle
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publish did. Invariant: `committed` and `failed` together are all targets."""

    committed: tuple[str, ...]
    failed: Mapping[str, str]
    """Reason by engine name; its weights may be anything, so it must leave the fleet."""
    metrics: Mapping[str, float]


class Publisher:
    """Invariant: an engine commits a version only if its checksums equal the sender's, and is always resumed."""

    def __init__(
        self, trainer: Handle, source: Layout, resharder: Component, options: Any, run_dir: str, deadline_s: float
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._component = resharder
        self._options = options
        self._deadline_s = deadline_s
        self._resharder: Resharder = resharder.load()(options, run_dir)
        self._plan: Plan | None = None
        self._members: tuple[str, ...] = ()

    async def stage(self, version: Version, targets: Sequence[Target]) -> Staged:
        """Send `version` beside the running weights and verify it. TransferFailed when the sender failed.

        The trainer is free for its next step once this returns.
        """
        began = time.perf_counter()
        transfer = Transfer(
            phase="stage",
            version=version,
            resharder=self._component,
            options=self._options,
            plan=self._plan_for(targets),
            deadline_s=self._deadline_s,
        )
        # Each side names its own trouble better than a call that ran out; so give it the time to.
        sending = self._trainer.call("send", transfer, deadline_s=self._deadline_s + 5.0)
        receiving = [
            target.handle.call("receive", replace(transfer, member=member), deadline_s=self._deadline_s + 5.0)
            for member, target in enumerate(targets)
        ]
        sent, *received = await asyncio.gather(sending, *receiving, return_exceptions=True)
        failed = {
            target.name: reason
            for target, receipt in zip(targets, received, strict=True)
            if (reason := _verify(sent, receipt))
        }
        staged = Staged(
            transfer=transfer,
            targets=tuple(targets),
            failed=failed,
            seconds=time.perf_counter() - began,
            num_bytes=sent.num_bytes if isinstance(sent, Receipt) else 0,
        )
        if failed or isinstance(sent, BaseException):
            self._plan = None  # the road had a fault: the next publish builds a new one
        if isinstance(sent, BaseException):
            await staged.roll_back()
            raise TransferFailed(
                f"version {version} was not published, the trainer could not send it: {_said(sent)}"
            ) from sent
        return staged

    def _plan_for(self, targets: Sequence[Target]) -> Plan:
        members = tuple(target.name for target in targets)
        if self._plan is None or members != self._members:
            self._plan = self._resharder.plan(self._source, [target.layout for target in targets])
            self._members = members
        return self._plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that lies beside the running weights. Invariant: ends in `commit` or `roll_back`, once."""

    transfer: Transfer
    """What the trainer sent; the other phases repeat it for each member."""
    targets: tuple[Target, ...]
    failed: Mapping[str, str]
    """Engines that did not verify it, with the reason."""
    seconds: float
    num_bytes: int

    async def commit(self) -> Published:
        """Make the version the running one on every engine that verified it."""
        began = time.perf_counter()
        chosen = [(member, target) for member, target in enumerate(self.targets) if target.name not in self.failed]
        results = await asyncio.gather(*(self._commit_one(member, target) for member, target in chosen))
        failed = {**self.failed, **{target.name: r for (_, target), r in zip(chosen, results, strict=True) if r}}
        return Published(
            committed=tuple(target.name for target in self.targets if target.name not in failed),
            failed=failed,
            metrics={
                "weights/stage_s": self.seconds,
                "weights/commit_s": time.perf_counter() - began,
                "weights/bytes": float(self.num_bytes),
            },
        )

    async def roll_back(self) -> None:
        """Make every engine forget what is staged; engines that cannot even do that are left to `lost`."""
        phases = [
            target.handle.call("receive", self._phase("rollback", member), deadline_s=30.0)
            for member, target in enumerate(self.targets)
        ]
        await asyncio.gather(*phases, return_exceptions=True)

    async def _commit_one(self, member: int, target: Target) -> str | None:
        deadline_s = self.transfer.deadline_s
        try:
            try:
                await target.handle.call("pause", "keep", deadline_s=deadline_s)
                await target.handle.call("receive", self._phase("commit", member), deadline_s=deadline_s)
            finally:
                await target.handle.call("resume", deadline_s=deadline_s)
        except (TransferFailed, WorkerFailed) as error:
            return _said(error)
        return None

    def _phase(self, phase: Phase, member: int) -> Transfer:
        return replace(self.transfer, phase=phase, member=member)


def _verify(sent: Receipt | BaseException, received: Receipt | BaseException) -> str:
    """Return what is wrong with a receiver's receipt, or an empty string."""
    if isinstance(received, BaseException):
        return _said(received)
    if isinstance(sent, BaseException):
        return ""
    if received.checksums == sent.checksums:
        return ""
    wrong = sorted(
        name
        for name in sent.checksums.keys() | received.checksums.keys()
        if sent.checksums.get(name) != received.checksums.get(name)
    )
    return f"{len(wrong)} of {len(sent.checksums)} tensors arrived with another checksum, the first is {wrong[0]!r}"


def _said(error: BaseException) -> str:
    """Return an error's text, never empty: an empty reason means that nothing is wrong."""
    return str(error) or type(error).__name__
