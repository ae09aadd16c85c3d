"""Sending weights: each rank its own pieces, or rank 0 whole tensors that it gathers one at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from torch import Tensor

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
        with _gone_through(tensors):
            if not sends:
                return Receipt(version=transfer.version, checksums={})
            return self._sender.send(transfer, tensors)

    def begin(self, transfer: Transfer) -> None:
        """Take this rank's pieces as they are now; a plan that wants none is gone through to its end. TransferFailed.

        Nothing is kept whole: whole tensors are sent while they are gathered.
        """
        self._receipt = None
        source = transfer.plan.source
        if source.num_ranks == 1 or (source.pieces and source.pieces[self._rank]):
            with _gone_through(self._shards.own()) as tensors:
                self._sender.take(transfer, tensors)
        else:
            self._receipt = self.send(transfer)

    def finish(self) -> Receipt:
        """Send what `begin` took; TransferFailed. It may run in another thread."""
        return self._receipt if self._receipt is not None else self._sender.deliver()


@contextmanager
def _gone_through(tensors: Iterator[tuple[str, Tensor]]) -> Generator[Iterator[tuple[str, Tensor]]]:
    """Go on to the end of what the block leaves: all ranks gather in it, and do not know of a sender that gave up."""
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass
