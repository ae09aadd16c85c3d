"""Sending weights: each rank its own pieces, or rank 0 whole tensors that it gathers one at a time."""

from __future__ import annotations

from areal.algorithms.update.sending import BackgroundSender
from areal.contracts.transfer import Receipt, Transfer
from areal_fsdp2.shards import Shards


class Outgoing:
    """One rank's part of the sends. Invariant: all ranks go through every gathering to its end, whoever fails."""

    def __init__(self, shards: Shards, rank: int, sender: BackgroundSender) -> None:
        self._shards = shards
        self._rank = rank
        self._sender = sender
        self._receipt: Receipt | None = None
        """Of a send that left nothing to do."""

    def send(self, transfer: Transfer) -> Receipt:
        """Send this rank's pieces, or on rank 0 everything if the plan wants no pieces; TransferFailed."""
        pieces = transfer.plan.source.pieces
        sends = bool(pieces[self._rank]) if pieces else self._rank == 0
        tensors = self._shards.own() if pieces else self._shards.gathered()
        try:
            if not sends:
                return Receipt(version=transfer.version, checksums={})
            return self._sender.send(transfer, tensors)
        finally:
            for _ in tensors:  # if the sender gave up: the other ranks do not know
                pass

    def begin(self, transfer: Transfer) -> None:
        """Take this rank's pieces as they are now; a plan that wants none is gone through to its end. TransferFailed.

        Nothing is kept whole: whole tensors are sent while they are gathered.
        """
        self._receipt = None
        if transfer.plan.source.num_ranks == 1 or (transfer.plan.source.pieces and self._shards.pieces[self._rank]):
            tensors = self._shards.own()
            try:
                self._sender.take(transfer, tensors)
            finally:
                for _ in tensors:  # merging gathers on all ranks, and the others do not know of a sender that gave up
                    pass
        else:
            self._receipt = self.send(transfer)

    def finish(self) -> Receipt:
        """Send what `begin` took; TransferFailed. It may run in another thread."""
        return self._receipt if self._receipt is not None else self._sender.deliver()
