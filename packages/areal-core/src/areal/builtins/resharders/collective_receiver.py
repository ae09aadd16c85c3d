"""The engine's half of the collective road; `collective` says how both halves talk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from areal.builtins.resharders.bucket import Incoming, merged
from areal.builtins.resharders.control import Channel, connect
from areal.builtins.resharders.gathering import REPORT_S
from areal.builtins.resharders.group import Group, PeerLost
from areal.builtins.resharders.pieces import Assembly, items_of, sending_ranks
from areal.builtins.resharders.streams import is_framed, receive_framed, receive_whole
from areal.builtins.resharders.wire import Deadline
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan
from areal.errors import TransferFailed


class CollectiveReceiver:
    """Invariant: leaves all groups on any failure, so that neither trainer ranks nor other engines wait for it."""

    def __init__(self, plan: Plan, member: int) -> None:
        self._plan = plan
        self._member = member
        self._deadline = Deadline(0.0)
        self._streams = [items_of(plan, rank) for rank in sending_ranks(plan.source)]
        self._buckets = merged(self._streams, plan.details["bucket_bytes"])
        self._groups: list[Group] = []
        self._token = ""
        self._kept: list[torch.Tensor] = []
        self._held = ""

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor when it is whole, in the memory that the collective moves (the CPU's for gloo) or, where
        deltas may come, in the CPU's; TransferFailed.
        """
        self._deadline = Deadline(deadline_s)
        return self._read(version, self._deadline)

    def interrupt(self) -> None:
        """Wait no longer."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the groups. Idempotent."""
        for group in self._groups:
            group.drop()
        self._groups = []

    def _read(self, version: Version, deadline: Deadline) -> Iterator[tuple[str, torch.Tensor]]:
        address, port = self._plan.source.address, self._plan.details["port"]
        channel = connect(address, port, deadline)
        if channel is None:
            raise TransferFailed(
                f"the trainer's sender did not open {address}:{port} for version {version}"
                f" within {deadline.seconds:g} s"
            )
        has_all = False
        told: dict[str, Any] = {}

        def arrived() -> None:
            nonlocal has_all
            self._held = told["transfer"]
            channel.send({"done": version}, deadline)
            has_all = True

        try:
            told = self._join(channel, version, deadline)
            yield from self._tensors(arrived, delta=told["delta"])
        except (PeerLost, OSError) as error:
            self.close()
            raise TransferFailed(self._cause(channel, version, deadline, error)) from error
        finally:
            if not has_all:  # the consumer stopped reading, or the transfer was refused
                self.close()
                channel.try_send({"failed": f"it stopped reading version {version}"})
            channel.close()

    def _tensors(self, arrived: Callable[[], None], *, delta: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all streams; what is kept counts for nothing until all of them are there."""
        device = self._groups[0].device
        self._held = ""
        keeps = self._plan.details["delta"] != "never"
        if keeps and not self._kept:
            sizes = [sum(item.num_bytes for item in items) for items in self._streams]
            self._kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        home = torch.device("cpu") if keeps else device
        assembly = Assembly(self._plan, home)
        kept = self._kept or [None] * len(self._streams)
        incoming = [Incoming(items, assembly, home, memory) for items, memory in zip(self._streams, kept, strict=True)]
        if keeps and is_framed(device, delta=delta):
            yield from receive_framed(self._groups, incoming, self._buckets, device, arrived)
        else:
            yield from receive_whole(self._groups, incoming, self._buckets, arrived)
        yield from assembly.rest()

    def _join(self, channel: Channel, version: Version, deadline: Deadline) -> dict[str, Any]:
        """Ask for the version, be in the groups that the first rank names, and return what it says."""
        held = self._token if self._groups else ""
        hello = {"uid": self._plan.uid, "member": self._member, "version": version, "group": held, "base": self._held}
        channel.send(hello, deadline)
        try:
            told = channel.receive(deadline)
        except TimeoutError:
            raise TransferFailed(
                f"the trainer's sender did not start version {version} within {deadline.seconds:g} s"
            ) from None
        if "go" not in told:
            raise TransferFailed(f"the trainer's sender refused version {version}: {told.get('failed')}")
        if not told["new"]:
            for group in self._groups:
                group.begin(deadline)
            return told
        self.close()
        self._token = told["go"]
        collective, size = self._plan.details["collective"], len(self._plan.targets) + 1
        for address, port in told["stores"]:
            self._groups.append(Group(collective, address, port, self._member + 1, size, deadline))
            self._groups[-1].join(self._plan.targets[self._member].address)
        return told

    def _cause(self, channel: Channel, version: Version, deadline: Deadline, error: Exception) -> str:
        """Report to the first rank that the fault is not ours, and say what it says about the failure."""
        if deadline.left_s == 0:
            return f"version {version} did not arrive from the trainer's sender within {deadline.seconds:g} s"
        channel.try_send({"broken": str(error)})
        try:
            told = channel.receive(Deadline(2 * REPORT_S))
        except TimeoutError:
            return f"the connection broke while the trainer's sender sent version {version}: {error}"
        except OSError:
            return f"the trainer's sender is gone, before version {version} had arrived"
        return f"the trainer's sender gave up version {version}: {told.get('failed', error)}"
