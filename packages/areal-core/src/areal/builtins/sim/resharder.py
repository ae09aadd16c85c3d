"""The resharder ``sim``: a version's number travels, and takes the time that weights would."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from areal.builtins.sim.clock import charge
from areal.contracts.messages import Version
from areal.contracts.options import Options
from areal.contracts.transfer import Layout, Plan, Receipt, Transfer
from areal.errors import TransferFailed

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = "simulated_s"
"""In a plan's details: how long a transfer takes."""


class SimReshardOptions(Options):
    """Invariant: a transfer takes as long for a thousand engines as for one, as a broadcast in a tree nearly does."""

    transfer_s: float = Field(default=2.0, ge=0)
    """Seconds between the trainer's first byte and the last engine's last one."""


class SimResharder:
    """Moves a version's number. Invariant: both halves work from the plan only.

    The conformance kit of resharders compares tensors on both sides, and here are none.
    """

    def __init__(self, options: SimReshardOptions | None, run_dir: str) -> None:
        self._options = options or SimReshardOptions()

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        """TransferFailed for a member that holds weights."""
        for side, layout in (("trainer", source), *(("engine", target) for target in targets)):
            if layout.collective != "sim":
                raise TransferFailed(
                    f"the resharder 'sim' carries no weights and the {side} on {layout.host} wants some; leave the "
                    "choice to the run (reshard.name=auto), or use engine sim and backend sim"
                )
        details = {SECONDS: self._options.transfer_s}
        return Plan(uid=uuid.uuid4().hex, source=source, targets=tuple(targets), details=details)

    def sender(self, plan: Plan, rank: int = 0) -> SimSender:
        return SimSender(plan)

    def receiver(self, plan: Plan, member: int) -> SimReceiver:
        return SimReceiver()


class SimSender:
    """Invariant: takes the plan's seconds and sends nothing."""

    def __init__(self, plan: Plan) -> None:
        self._seconds: float = plan.details[SECONDS]

    def send(self, version: Version, tensors: Iterable[tuple[str, Tensor]], deadline_s: float) -> Receipt:
        """TransferFailed when the transfer takes longer than it may."""
        if self._seconds > deadline_s:
            raise TransferFailed(f"a simulated transfer takes {self._seconds:g} s and has {deadline_s:g} s")
        charge(self._seconds)
        return Receipt(version=version, checksums=_checksums(version), seconds=self._seconds)

    def close(self) -> None: ...


class SimReceiver:
    """Invariant: yields nothing; the engine ``sim`` asks `receive_s` instead, and waits on the event loop's clock."""

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        raise TransferFailed("the resharder 'sim' carries no weights; an engine that wants some needs another one")

    def close(self) -> None: ...


def receive_s(transfer: Transfer, engine: str) -> tuple[float, Mapping[str, int]]:
    """Return how long an engine's part of a transfer takes and its checksums; TransferFailed for a real transfer."""
    seconds: float | None = transfer.plan.details.get(SECONDS)
    if seconds is None:
        raise TransferFailed(
            f"engine {engine!r} is simulated and takes weights from the resharder 'sim' only, not from "
            f"{transfer.resharder.name!r}"
        )
    if seconds > transfer.deadline_s:
        raise TransferFailed(f"a simulated transfer takes {seconds:g} s and has {transfer.deadline_s:g} s")
    return seconds, _checksums(transfer.version)


def _checksums(version: Version) -> dict[str, int]:
    return {"version": zlib.crc32(str(version).encode())}
