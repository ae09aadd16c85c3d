"""The resharder: moves weights from the trainer's layout into the engines' layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from areal.contracts.messages import Version
from areal.contracts.transfer import Layout, Plan, Receipt

if TYPE_CHECKING:
    from torch import Tensor


class Sender(Protocol):
    """The half beside a trainer rank. Invariant: after `send` returns or raises, no receiver waits for it."""

    def send(self, version: Version, tensors: Iterable[tuple[str, Tensor]], deadline_s: float) -> Receipt:
        """Send this rank's pieces of the plan's source, cast to the receivers' dtype; TransferFailed.

        `tensors`: (HF name, the piece in the trainer's dtype) in the order of `pieces_of`.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Takes(Sender, Protocol):
    """Optional, for senders that copy into memory of their own: `send` in two halves.

    Invariant: `take` and then `deliver` do what `send` does, and what `take` has returned for may change.
    """

    def take(self, version: Version, tensors: Iterable[tuple[str, Tensor]], deadline_s: float) -> None:
        """Copy this rank's pieces as `send` wants them; TransferFailed, and then there is nothing to deliver."""
        ...

    def deliver(self) -> Receipt:
        """Bring what was taken to the receivers; perhaps from another thread, never beside `take`. TransferFailed."""
        ...


class Receiver(Protocol):
    """The half beside an engine. Invariant: yields every tensor of the plan exactly once, or raises."""

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor in the receiver's dtype on the CPU or the device); TransferFailed."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Lasting(Receiver, Protocol):
    """Optional, for receivers: nobody needs to copy what they yield.

    Invariant: a yielded tensor never changes while somebody holds it, whatever becomes of sender and receiver.
    """

    lasting: Literal[True]


@runtime_checkable
class Interrupts(Protocol):
    """Optional, for senders, receivers and backends: need not wait for a peer that is gone.

    Invariant: safe from any thread, at any time.
    """

    def interrupt(self) -> None:
        """Make the `send` or `receive` that runs, if one does, end soon with TransferFailed."""
        ...


SHARDS = "shards"
"""Capability of a resharder that takes pieces from every trainer rank; for others `Layout.pieces` is taken away before
they plan, and rank 0 gathers each tensor in turn."""


@runtime_checkable
class Resharder(Protocol):
    """Made as ``factory(options, run_dir)`` on the controller and, from the plan alone, beside each member.

    Invariant: both halves work from the plan only; they never ask the controller.
    """

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        """Decide the road for these members; TransferFailed in one sentence when there is none."""
        ...

    def sender(self, plan: Plan, rank: int = 0) -> Sender:
        """Return the half beside this trainer rank. Every rank of the plan's source that has pieces has one."""
        ...

    def receiver(self, plan: Plan, member: int) -> Receiver: ...
