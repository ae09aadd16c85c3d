"""prepare -> transfer -> verify -> commit: how a version reaches the engines.

sender      begin_send ─► free for the next training step      finish_send ─┐
engines     receive(stage), beside their requests ─────────────────────────┤
publisher                                                                  └─► compare checksums
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
        self,
        trainer: Calls,
        source: Layout,
        resharder: Component,
        options: Any,
        run_dir: str,
        deadline_s: float,
        *,
        overlaps: bool = True,
    ) -> None:
        """`overlaps`: whether the trainer goes on while it sends, where its backend can."""
        self._trainer = trainer
        # Who cannot take pieces gets every tensor whole from rank 0.
        self._source = source if SHARDS in resharder.capabilities else replace(source, pieces=())
        self._component = resharder
        self._options = options
        self._deadline_s = deadline_s
        self._overlaps = overlaps
        self._resharder: Resharder = resharder.load()(options, run_dir)
        self._plan: Plan | None = None
        self._members: tuple[str, ...] = ()
        self._staged: Staged | None = None

    async def stage(self, version: Version, targets: Sequence[Target]) -> Staged:
        """Begin to send `version` beside the running weights. TransferFailed when that fails, TrainerLost.

        The trainer is free for its next step once this returns; it may still be sending, and the engines reading.
        """
        transfer = Transfer(
            phase="stage",
            version=version,
            resharder=self._component,
            options=self._options,
            plan=self._plan_for(targets),
            deadline_s=self._deadline_s,
            overlaps=self._overlaps,
        )
        self._staged = staged = Staged(self._trainer, transfer, targets)
        await staged.begin()
        return staged

    def forget_plan(self) -> None:
        """The road had a fault, or begins elsewhere now: the next publish builds a new one."""
        self._plan = None

    def _plan_for(self, targets: Sequence[Target]) -> Plan:
        members = tuple(target.name for target in targets)
        last_failed = self._staged is not None and (self._staged.failed or self._staged.is_broken)
        if self._plan is None or last_failed or members != self._members:
            self._plan = self._resharder.plan(self._source, [target.layout for target in targets])
            self._members = members
        return self._plan


class Staged:
    """A version on its way beside the running weights. Invariant: ends in `commit` or `roll_back`, once."""

    def __init__(self, trainer: Calls, transfer: Transfer, targets: Sequence[Target]) -> None:
        """Have the engines receive."""
        self.transfer = transfer
        """What the trainer sends; the other phases repeat it for each member."""
        self.is_broken = False
        """Whether the trainer could not send it: no engine keeps anything of it, and its plan is of no more use."""
        self.failed: Mapping[str, str] = {}
        """Engines that did not verify or commit it, with the reason; known once `commit` returns."""
        self._trainer = trainer
        self._targets = tuple(targets)
        # Each side names its own trouble better than a call that ran out; so give it the time to.
        self._patience_s = transfer.deadline_s + 5.0
        self._receiving = [
            asyncio.ensure_future(
                target.handle.call("receive", replace(transfer, member=member), deadline_s=self._patience_s)
            )
            for member, target in enumerate(targets)
        ]
        self._sent: Receipt | None = None
        self._began = asyncio.get_running_loop().time()
        self._begin_s = self._send_s = 0.0

    async def begin(self) -> None:
        """Return when the trainer's weights may change; TransferFailed, TrainerLost, and then it is rolled back."""
        await self._ask_sender("begin_send", self.transfer)
        self._begin_s = asyncio.get_running_loop().time() - self._began

    async def arrived(self) -> Receipt:
        """Wait until the trainer has sent all of it; raises as `begin`."""
        if self._sent is not None:
            return self._sent
        sent: Receipt = await self._ask_sender("finish_send")
        self._sent = sent
        self._send_s = asyncio.get_running_loop().time() - self._began
        return sent

    async def commit(self) -> Published:
        """Wait for all receipts and make the version the running one wherever it arrived whole; raises as `begin`."""
        sent = await self.arrived()
        began = asyncio.get_running_loop().time()
        receipts = await asyncio.gather(*self._receiving, return_exceptions=True)
        received_s = asyncio.get_running_loop().time() - began
        results = await asyncio.gather(
            *(
                self._commit_one(member, target, _verify(sent, receipt))
                for member, (target, receipt) in enumerate(zip(self._targets, receipts, strict=True))
            )
        )
        self.failed = {target.name: reason for target, reason in zip(self._targets, results, strict=True) if reason}
        return Published(
            committed=tuple(target.name for target in self._targets if target.name not in self.failed),
            failed=self.failed,
            metrics={
                "weights/begin_s": self._begin_s,
                "weights/send_s": self._send_s,
                "weights/receive_s": received_s,
                "weights/commit_s": asyncio.get_running_loop().time() - began - received_s,
                "weights/bytes": float(sent.num_bytes),
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

    async def _ask_sender(self, method: str, *args: Any) -> Any:
        """Have the trainer do its part; when it cannot, no engine keeps anything of the version."""
        asking = asyncio.ensure_future(self._trainer.call(method, *args, deadline_s=self._patience_s))
        try:
            return await self._heard(asking)
        except (ArealError, asyncio.CancelledError) as error:
            self.is_broken = True
            await self.roll_back()
            if isinstance(error, asyncio.CancelledError | TrainerLost):
                raise
            raise TransferFailed(
                f"version {self.transfer.version} was not published, the trainer could not send it: {_said(error)}"
            ) from error

    async def _heard(self, asking: asyncio.Future[Any]) -> Any:
        """Wait for the trainer's answer; when it waits for a receiver that is gone it is told so."""
        try:
            open_ones: set[asyncio.Future[Any]] = {asking, *self._receiving}
            while not asking.done():
                done, open_ones = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                if any(_is_gone(receipt) for receipt in done - {asking}):
                    await asyncio.wait([asking], timeout=NOTICE_S)  # most roads notice it themselves
                    if not asking.done():
                        with suppress(WorkerFailed):  # whatever is wrong with it, the send says so as well
                            await self._trainer.call("interrupt", deadline_s=NOTICE_S)
            return await asking
        except asyncio.CancelledError:
            asking.cancel()
            raise

    async def _commit_one(self, member: int, target: Target, wrong: str) -> str:
        """Return why the engine does not run the version now, or an empty string; `wrong`: with what it received."""
        if wrong:
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
