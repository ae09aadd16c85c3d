"""The sending end of a weight update, for every backend: one sender at a time, that of the newest plan."""

from __future__ import annotations

from areal.contracts.resharder import Interrupts, Sender
from areal.contracts.transfer import Plan, Transfer


class KeptSender:
    """Invariant: at most one sender is open, and it belongs to the plan that was asked for last."""

    def __init__(self, rank: int = 0) -> None:
        """`rank`: of the trainer, beside which the sender runs."""
        self._rank = rank
        self._held: tuple[Plan, Sender] | None = None

    def of(self, transfer: Transfer) -> Sender:
        """Return the sender of a transfer's plan: the one that is open, or a new one in place of another plan's."""
        if self._held is None or self._held[0].uid != transfer.plan.uid:
            self.close()
            resharder = transfer.resharder.load()(transfer.options, "")
            self._held = transfer.plan, resharder.sender(transfer.plan, self._rank)
        return self._held[1]

    def interrupt(self) -> None:
        """Make the `send` that runs wait no longer for receivers that are gone, where the resharder can."""
        if self._held is not None and isinstance(self._held[1], Interrupts):
            self._held[1].interrupt()

    def close(self) -> None:
        """Close the sender, if there is one. Idempotent."""
        if self._held is not None:
            self._held[1].close()
            self._held = None
