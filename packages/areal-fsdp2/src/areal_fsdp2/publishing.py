"""Sending weights: each rank its own pieces, or rank 0 whole tensors that it gathers one at a time."""

from __future__ import annotations

from areal.contracts.resharder import Interrupts, Sender
from areal.contracts.transfer import Plan, Receipt, Transfer
from areal_fsdp2.shards import Shards


class Publishing:
    """Invariant: the sender of the newest plan is kept for its next version; all ranks go through every send."""

    def __init__(self, shards: Shards, rank: int) -> None:
        self._shards = shards
        self._rank = rank
        self._plan: Plan | None = None
        self._sender: Sender | None = None

    def send(self, transfer: Transfer) -> Receipt:
        """Send this rank's pieces, or on rank 0 everything if the plan wants no pieces; TransferFailed."""
        pieces = transfer.plan.source.pieces
        sends = bool(pieces[self._rank]) if pieces else self._rank == 0
        tensors = self._shards.own() if pieces else self._shards.gathered()
        try:
            if not sends:
                return Receipt(version=transfer.version, checksums={})
            return self._sender_of(transfer).send(transfer.version, tensors, transfer.deadline_s)
        finally:
            for _ in tensors:  # if the sender gave up: the other ranks do not know
                pass

    def interrupt(self) -> None:
        """Make the `send` that runs wait no longer for receivers that are gone, where the resharder can."""
        if isinstance(self._sender, Interrupts):
            self._sender.interrupt()

    def close(self) -> None:
        """Close the sender, if there is one. Idempotent."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _sender_of(self, transfer: Transfer) -> Sender:
        if self._sender is None or self._plan is None or self._plan.uid != transfer.plan.uid:
            self.close()
            resharder = transfer.resharder.load()(transfer.options, "")
            self._plan, self._sender = transfer.plan, resharder.sender(transfer.plan, self._rank)
        assert self._sender is not None
        return self._sender
