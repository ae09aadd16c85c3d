"""Sending weights: each rank its own pieces, or rank 0 whole tensors that it gathers one at a time."""

from __future__ import annotations

from areal.contracts.sending import KeptSender
from areal.contracts.transfer import Receipt, Transfer
from areal_fsdp2.shards import Shards


def send(shards: Shards, sender: KeptSender, transfer: Transfer, rank: int) -> Receipt:
    """Send this rank's pieces, or on rank 0 everything if the plan wants no pieces; TransferFailed.

    All ranks go through every send to its end.
    """
    pieces = transfer.plan.source.pieces
    sends = bool(pieces[rank]) if pieces else rank == 0
    tensors = shards.own() if pieces else shards.gathered()
    try:
        if not sends:
            return Receipt(version=transfer.version, checksums={})
        return sender.of(transfer).send(transfer.version, tensors, transfer.deadline_s)
    finally:
        for _ in tensors:  # if the sender gave up: the other ranks do not know
            pass
