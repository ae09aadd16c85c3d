"""The resharder `xccl`: from memory to memory, by shared memory on one host and a process group otherwise."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from areal.builtins.resharders.collective import CollectiveHelper, CollectiveSender, collective_sender
from areal.builtins.resharders.collective_receiver import CollectiveReceiver
from areal.builtins.resharders.control import free_port
from areal.builtins.resharders.delta import Mode
from areal.builtins.resharders.pieces import check_pieces
from areal.builtins.resharders.segment import Form
from areal.builtins.resharders.shm import NUM_SEGMENTS, ShmHelper, ShmSender, room_for, shm_sender
from areal.builtins.resharders.shm_receiver import ShmReceiver
from areal.builtins.resharders.wire import check_members
from areal.contracts.options import Options
from areal.contracts.transfer import Layout, Plan
from areal.errors import TransferFailed


class XcclOptions(Options):
    """Invariant: the options change how fast weights travel, never which."""

    shared_memory: Literal["auto", "never"] = "auto"
    """``auto``: when all members are on one host, hold their weights in host memory, and there is room for two
    copies of the weights in ``/dev/shm``."""
    bucket_bytes: int = Field(default=16 * 2**20, ge=4096)
    """Bytes of one broadcast, at least a page: with a few bytes each, a model would be under way for days."""
    delta: Mode = "auto"
    """Whether the collective sends only the 16-bit words that changed since the last version: ``auto`` where that takes
    less time by the senders' own clocks (asked for gloo only), ``never``, or ``always``. Unless ``never``, each side
    keeps what it sent or received last in host memory. Shared memory is faster than any delta and never uses one."""
    anchor_every: int = Field(default=32, ge=1)
    """Versions of which one is sent whole, whatever `delta` says."""


class XcclResharder:
    """Weights go from the trainer's ranks to one receiver per engine. Invariant: the plan alone names the road.

    The collective is the members' common one, else gloo. Only gloo and shared memory were tested; nccl needs the
    trainer's ranks and the engines on different devices, and hccl the library that registers it with torch.
    The port of a plan is chosen when the plan is made: when somebody takes it before the first `send`, that raises
    TransferFailed and a new plan chooses another.
    """

    def __init__(self, options: XcclOptions | None, run_dir: str) -> None:
        self._options = options or XcclOptions()

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        """Choose shared memory or the collective; TransferFailed when the members cannot reach each other."""
        check_members(source, targets)
        check_pieces(source)
        collectives = {member.collective for member in (source, *targets)}
        collective = collectives.pop() if len(collectives) == 1 else "gloo"
        plan = Plan(uid=uuid.uuid4().hex, source=source, targets=tuple(targets))
        if collective == "gloo" and self._shares_memory(plan):
            details: dict[str, object] = {"road": "shared_memory"}
        else:
            details = self._collective_details(plan, collective)
        return Plan(uid=plan.uid, source=source, targets=plan.targets, details=details)

    def sender(self, plan: Plan, rank: int = 0) -> ShmSender | ShmHelper | CollectiveSender | CollectiveHelper:
        return (shm_sender if plan.details["road"] == "shared_memory" else collective_sender)(plan, rank)

    def receiver(self, plan: Plan, member: int) -> ShmReceiver | CollectiveReceiver:
        if plan.details["road"] == "shared_memory":
            return ShmReceiver(plan, member)
        return CollectiveReceiver(plan, member)

    def _shares_memory(self, plan: Plan) -> bool:
        """Whether shared memory is the road; on one host the controller's own ``/dev/shm`` is the members'."""
        on_one_host = all(target.host == plan.source.host for target in plan.targets)
        if self._options.shared_memory == "never" or not on_one_host:
            return False
        return room_for(NUM_SEGMENTS * Form(plan).size)

    def _collective_details(self, plan: Plan, collective: str) -> dict[str, object]:
        address = plan.source.address
        far = [target.host for target in plan.targets if target.host != plan.source.host]
        if far and (address.startswith("127.") or address in ("localhost", "::1")):
            raise TransferFailed(
                f"the engine on {far[0]} cannot reach the trainer on {plan.source.host} at {address};"
                " give the trainer an address of the network, or use the resharder 'disk'"
            )
        return {
            "road": "collective",
            "collective": collective,
            "port": free_port(address),
            "bucket_bytes": self._options.bucket_bytes,
            "delta": self._delta(collective),
            "anchor_every": self._options.anchor_every,
        }

    def _delta(self, collective: str) -> Mode:
        """The host would have to compare what a device's collective moves without it."""
        return "never" if self._options.delta == "auto" and collective != "gloo" else self._options.delta
