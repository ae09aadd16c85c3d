"""prepare -> transfer -> verify -> commit: how a version reaches the engines.

sender      send(stage) ───────► free for the next training step
engines     receive(stage) ────┐ beside it, generation goes on
publisher                      └─► compare checksums
engines     pause ─ receive(commit) ─ resume        each on its own, resume whatever happened
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from areal.contracts.cluster import Calls, Handle
from areal.contracts.component import Component
from areal.contracts.messages import Version
from areal.contracts.resharder import SHARDS, Resharder
from areal.contracts.transfer import Layout, Phase, Plan, Receipt, Transfer
from areal.errors import ArealError, TrainerLost, TransferFailed, WorkerFailed

NOTICE_S = 2.0
"""For a sender to notice by itself that a receiver is gone, and then for it to hear so."""


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
        self, trainer: Calls, source: Layout, resharder: Component, options: Any, run_dir: str, deadline_s: float
    ) -> None:
        self._trainer = trainer
        # Who cannot take pieces gets every tensor whole from rank 0.
        self._source = source if SHARDS in resharder.capabilities else replace(source, pieces=())
        self._component = resharder
        self._options = options
        self._deadline_s = deadline_s
        self._resharder: Resharder = resharder.load()(options, run_dir)
        self._plan: Plan | None = None
        self._members: tuple[str, ...] = ()
        self._staged: Staged | None = None

    async def stage(self, version: Version, targets: Sequence[Target]) -> Staged:
        """Send `version` beside the running weights. TransferFailed when that fails, TrainerLost with its sender.

        The trainer is free for its next step once this returns; the engines may still be reading.
        """
        began = asyncio.get_running_loop().time()
        transfer = Transfer(
            phase="stage",
            version=version,
            resharder=self._component,
            options=self._options,
            plan=self._plan_for(targets),
            deadline_s=self._deadline_s,
        )
        # Each side names its own trouble better than a call that ran out; so give it the time to.
        patience_s = self._deadline_s + 5.0
        receiving = [
            asyncio.ensure_future(
                target.handle.call("receive", replace(transfer, member=member), deadline_s=patience_s)
            )
            for member, target in enumerate(targets)
        ]
        sending = asyncio.ensure_future(self._trainer.call("send", transfer, deadline_s=patience_s))
        self._staged = staged = Staged(transfer, targets, receiving)
        try:
            staged.sent = await self._sent(sending, receiving)
        except (ArealError, asyncio.CancelledError) as error:
            self.forget_plan()
            await staged.roll_back()
            if isinstance(error, asyncio.CancelledError | TrainerLost):
                raise
            raise TransferFailed(
                f"version {version} was not published, the trainer could not send it: {_said(error)}"
            ) from error
        staged.send_s = asyncio.get_running_loop().time() - began
        return staged

    async def _sent(self, sending: asyncio.Future[Receipt], receiving: Sequence[asyncio.Future[Receipt]]) -> Receipt:
        """Wait until the trainer has sent; one that waits for a receiver that is gone is told so."""
        try:
            open_ones: set[asyncio.Future[Receipt]] = {sending, *receiving}
            while not sending.done():
                done, open_ones = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                if any(_is_gone(receipt) for receipt in done - {sending}):
                    await asyncio.wait([sending], timeout=NOTICE_S)  # most roads notice it themselves
                    if not sending.done():
                        with suppress(WorkerFailed):  # whatever is wrong with it, the send says so as well
                            await self._trainer.call("interrupt", deadline_s=NOTICE_S)
            return await sending
        except asyncio.CancelledError:
            sending.cancel()
            raise

    def forget_plan(self) -> None:
        """The road had a fault, or begins elsewhere now: the next publish builds a new one."""
        self._plan = None

    def _plan_for(self, targets: Sequence[Target]) -> Plan:
        members = tuple(target.name for target in targets)
        last_failed = self._staged is not None and self._staged.failed
        if self._plan is None or last_failed or members != self._members:
            self._plan = self._resharder.plan(self._source, [target.layout for target in targets])
            self._members = members
        return self._plan


class Staged:
    """A version on its way beside the running weights. Invariant: ends in `commit` or `roll_back`, once."""

    def __init__(
        self, transfer: Transfer, targets: Sequence[Target], receiving: Sequence[asyncio.Future[Receipt]]
    ) -> None:
        self.transfer = transfer
        """What the trainer sent; the other phases repeat it for each member."""
        self.sent = Receipt(version=transfer.version, checksums={})
        self.send_s = 0.0
        self.failed: Mapping[str, str] = {}
        """Engines that did not verify or commit it, with the reason; known once `commit` returns."""
        self._targets = tuple(targets)
        self._receiving = receiving

    async def commit(self) -> Published:
        """Wait for the engines' receipts and make the version the running one wherever it arrived whole."""
        began = asyncio.get_running_loop().time()
        receipts = await asyncio.gather(*self._receiving, return_exceptions=True)
        received_s = asyncio.get_running_loop().time() - began
        results = await asyncio.gather(
            *(
                self._commit_one(member, target, receipt)
                for member, (target, receipt) in enumerate(zip(self._targets, receipts, strict=True))
            )
        )
        self.failed = {target.name: reason for target, reason in zip(self._targets, results, strict=True) if reason}
        return Published(
            committed=tuple(target.name for target in self._targets if target.name not in self.failed),
            failed=self.failed,
            metrics={
                "weights/send_s": self.send_s,
                "weights/receive_s": received_s,
                "weights/commit_s": asyncio.get_running_loop().time() - began - received_s,
                "weights/bytes": float(self.sent.num_bytes),
            },
        )

    async def roll_back(self) -> None:
        """Make every engine forget what it was sent; engines that cannot even do that are left to `lost`."""
        for receiving in self._receiving:
            receiving.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)
        phases = [
            target.handle.call("receive", self._phase("rollback", member), deadline_s=30.0)
            for member, target in enumerate(self._targets)
        ]
        await asyncio.gather(*phases, return_exceptions=True)

    async def _commit_one(self, member: int, target: Target, receipt: Receipt | BaseException) -> str:
        """Return why the engine does not run the version now, or an empty string."""
        if wrong := _verify(self.sent, receipt):
            return wrong
        deadline_s = self.transfer.deadline_s
        try:
            try:
                await target.handle.call("pause", "keep", deadline_s=deadline_s)
                await target.handle.call("receive", self._phase("commit", member), deadline_s=deadline_s)
            finally:
                await target.handle.call("resume", deadline_s=deadline_s)
        except (TransferFailed, WorkerFailed) as error:
            return _said(error)
        return ""

    def _phase(self, phase: Phase, member: int) -> Transfer:
        return replace(self.transfer, phase=phase, member=member)


def _is_gone(receipt: asyncio.Future[Receipt]) -> bool:
    return not receipt.cancelled() and isinstance(receipt.exception(), WorkerFailed)


def _verify(sent: Receipt, received: Receipt | BaseException) -> str:
    """Return what is wrong with a receiver's receipt, or an empty string."""
    if isinstance(received, BaseException):
        return _said(received)
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
