"""Sending weights that may change meanwhile: what is on its way is a copy, made before training goes on."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor

from areal.contracts.resharder import Sender, Takes
from areal.contracts.sending import KeptSender
from areal.contracts.transfer import Plan, Receipt, Transfer
from areal.errors import TransferFailed

CLOSE_S = 30.0
"""How long `close` waits for a `deliver` that it has interrupted."""


class BackgroundSender:
    """Invariant: what `take` has returned for may change; `deliver`, in whatever thread, sends it as it was."""

    def __init__(self, rank: int = 0) -> None:
        """`rank`: of the trainer, beside which the sender runs."""
        self._kept = KeptSender(rank)
        self._taken: tuple[Transfer, Sender, list[tuple[str, Tensor]]] | None = None
        self._copies: list[Tensor] = []
        self._delivering = threading.Lock()

    def send(self, transfer: Transfer, tensors: Iterable[tuple[str, Tensor]]) -> Receipt:
        """Send this rank's (HF name, piece) pairs in one go, without a copy. TransferFailed."""
        return self._sender(transfer).send(transfer.version, tensors, transfer.deadline_s)

    def take(self, transfer: Transfer, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's (HF name, piece) pairs, so that they may change before they are delivered. TransferFailed.

        Where the sender has no memory of its own for that, one copy of the pieces in the receivers' dtype stays beside
        them, on their device.
        """
        sender = self._sender(transfer)
        copies: list[tuple[str, Tensor]] = []
        if isinstance(sender, Takes):
            sender.take(transfer.version, tensors, transfer.deadline_s)
            self._copies = []
        else:
            copies = self._copied(transfer.plan, tensors)
        self._taken = transfer, sender, copies

    def deliver(self) -> Receipt:
        """Send what was taken, once; TransferFailed."""
        with self._delivering:
            if self._taken is None:
                raise TransferFailed("the trainer was asked to finish a send that it had not begun")
            (transfer, sender, copies), self._taken = self._taken, None
            if isinstance(sender, Takes):
                return sender.deliver()
            return sender.send(transfer.version, copies, transfer.deadline_s)

    def interrupt(self) -> None:
        """Make what is being sent wait no longer for receivers that are gone, where the resharder can."""
        self._kept.interrupt()

    def free(self) -> None:
        """Give the memory of the last copies back, once they are delivered."""
        self._copies = []

    def close(self) -> None:
        """End what is being delivered, close the sender, if there is one, and forget what was taken. Idempotent."""
        self._kept.interrupt()
        with self._alone():
            self._kept.close()
            self._taken = None
            self.free()

    def _sender(self, transfer: Transfer) -> Sender:
        with self._alone():
            return self._kept.of(transfer)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Wait until nothing is being delivered any more; what does not end within CLOSE_S is left alone."""
        is_alone = self._delivering.acquire(timeout=CLOSE_S)
        try:
            yield
        finally:
            if is_alone:
                self._delivering.release()

    def _copied(self, plan: Plan, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy into the memory of the version before, where that fits: fresh memory is several times slower."""
        dtype = _common_dtype(plan)
        old, copies = self._copies, list[tuple[str, Tensor]]()
        for number, (name, tensor) in enumerate(tensors):
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            fits = number < len(old) and (old[number].shape, old[number].dtype) == (tensor.shape, wanted)
            copy = old[number] if fits else tensor.new_empty(tensor.shape, dtype=wanted)
            copies.append((name, copy.copy_(tensor)))
        self._copies = [copy for _, copy in copies]
        return copies


def _common_dtype(plan: Plan) -> torch.dtype | None:
    """Return what all receivers store; None: not all the same."""
    names = {target.dtype for target in plan.targets}
    return getattr(torch, names.pop()) if len(names) == 1 else None
