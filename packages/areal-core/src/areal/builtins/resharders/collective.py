"""Weights through process groups: each trainer rank that has pieces has one of its own with all engines.

    engines, other ranks               first rank
    connect to the plan's port   --->  accepts until all members asked for this version
                                 <---  go: the groups to use, whether deltas may come
    a rank: where its store is   --->  when the groups are new; the engines hear of all stores with their go
    broadcasts, each rank its own pieces to all engines
    done                         --->  returns once every engine has everything
                                 <---  done, to the other ranks

Receivers join the groups by rank and take the ranks' buckets in one order that follows from the plan (`merged`), so
any two processes meet in the same order in all groups that they share. Whoever fails drops its connections; that ends
the broadcasts of all others at once.

For deltas both sides keep the bytes of the last transfer. Everybody says by a token which transfer that was: a version
number does not tell, since a version may be taken back and made again with other weights. Only when all tokens are one
may deltas come; whoever was interrupted, or is new, has none, and gets everything.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import torch

from areal import env
from areal.builtins.resharders.control import Channel, connect
from areal.builtins.resharders.delta import Choice
from areal.builtins.resharders.gathering import REPORT_S, Gathering
from areal.builtins.resharders.group import SENDER_RANK, Group, PeerLost
from areal.builtins.resharders.pieces import items_of, sending_ranks
from areal.builtins.resharders.streams import Tracked, send_buckets
from areal.builtins.resharders.wire import Deadline
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan, Receipt
from areal.errors import TransferFailed

Tensors = Iterable[tuple[str, torch.Tensor]]


def collective_sender(plan: Plan, rank: int) -> CollectiveSender | CollectiveHelper:
    """Return what this trainer rank sends with: the first rank that has pieces leads the others."""
    leads = rank == sending_ranks(plan.source)[0]
    return CollectiveSender(plan, rank) if leads else CollectiveHelper(plan, rank)


class Outlet:
    """One rank's way to the engines. Invariant: `held` names the transfer whose bytes both sides keep, or is empty."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self.items = items_of(plan, rank)
        self._group: Group | None = None
        self._token = ""
        self._choice = Choice(plan.details["delta"])
        self._tracked: Tracked | None = None
        self.held = ""

    def offer(self) -> dict[str, Any]:
        """Say what there is from the last transfer."""
        group = self._token if self._group is not None else ""
        return {"group": group, "base": self.held, "wants": self._choice.wants()}

    def open(self, token: str, address: str, deadline: Deadline) -> tuple[str, int]:
        """Open the store of a new group and return where it is. PeerLost, TransferFailed."""
        self.drop()
        size = len(self._plan.targets) + 1
        self._group = Group(self._plan.details["collective"], address, 0, SENDER_RANK, size, deadline)
        self._token = token
        return address, self._group.port

    def join(self, address: str, deadline: Deadline, *, new: bool) -> None:
        """Return when the engines are in the group too. PeerLost."""
        if self._group is None:
            raise PeerLost("the group is gone")
        if new:
            self._group.join(address)
        else:
            self._group.begin(deadline)

    def send(self, tensors: Tensors, *, delta: bool) -> tuple[dict[str, int], int]:
        """Send this rank's items; return checksums and the bytes sent to each engine. PeerLost, TransferFailed."""
        if self._group is None:
            raise PeerLost("the group is gone")
        self.held = ""
        group, bucket_bytes = self._group, self._plan.details["bucket_bytes"]
        if self._plan.details["delta"] == "never":
            checksums = send_buckets(group, self.items, tensors, bucket_bytes, group.device)
            return checksums, sum(item.num_bytes for item in self.items)
        if self._tracked is None:
            self._tracked = Tracked(self.items, self._choice)
        checksums = self._tracked.send(group, tensors, bucket_bytes, group.device, delta=delta)
        return checksums, self._tracked.num_bytes

    def drop(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.drop()
            self._group = None


class CollectiveSender:
    """The first rank's half. Invariant: returns only when every engine has every byte of every rank; on failure nobody
    waits for it.
    """

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self._plan = plan
        self._gathering = Gathering(plan)
        self._outlet = Outlet(plan, rank)
        self._deadline = Deadline(0.0)
        self._num_since_anchor = 0

    def send(self, version: Version, tensors: Tensors, deadline_s: float) -> Receipt:
        """Broadcast this rank's pieces; TransferFailed names who is missing, gone or gave up."""
        deadline = self._deadline = Deadline(deadline_s)
        reason = ""
        try:
            self._gathering.gather(version, deadline)
            go = self._agree()
            self._connect(go, version, deadline)
            checksums, size = self._outlet.send(tensors, delta=go["delta"])
            for peer in (*self._gathering.ranks, *self._gathering.engines):
                peer.ask("done", version, deadline)
            self._outlet.held = go["transfer"]
            self._gathering.tell(self._gathering.ranks, {"done": version})
        except BaseException as error:
            self._outlet.drop()
            reason = self._gathering.reason(deadline, error)
            if isinstance(error, TransferFailed) or not isinstance(error, Exception):
                raise
            raise TransferFailed(f"the trainer's sender gave up version {version}: {reason}") from error
        finally:
            self._gathering.dismiss(reason)
        return Receipt(version=version, checksums=checksums, num_bytes=size, seconds=deadline.elapsed_s)

    def interrupt(self) -> None:
        """Wait no longer for members that have not come."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the group and give the port back. Idempotent."""
        self._outlet.drop()
        self._gathering.close()

    def _agree(self) -> dict[str, Any]:
        """Decide what all do, from what each has: the old groups or new ones, deltas or everything."""
        senders = [self._outlet.offer(), *(peer.hello for peer in self._gathering.ranks)]
        everybody = [*senders, *(peer.hello for peer in self._gathering.engines)]
        groups, bases = ({hello.get(key, "") for hello in everybody} for key in ("group", "base"))
        keeps_groups = len(groups) == 1 and "" not in groups
        is_anchor = self._num_since_anchor + 1 >= self._plan.details["anchor_every"]
        delta = len(bases) == 1 and "" not in bases and not is_anchor and all(hello["wants"] for hello in senders)
        self._num_since_anchor = self._num_since_anchor + 1 if delta else 0
        return {
            "go": groups.pop() if keeps_groups else uuid.uuid4().hex,
            "new": not keeps_groups,
            "delta": delta,
            "transfer": uuid.uuid4().hex,
        }

    def _connect(self, go: dict[str, Any], version: Version, deadline: Deadline) -> None:
        address = self._plan.source.address
        stores: list[tuple[str, int]] = []
        for peer in self._gathering.ranks:
            peer.channel.send(go, deadline)
        if go["new"]:
            stores.append(self._outlet.open(go["go"], address, deadline))
            stores += [peer.ask("store", version, deadline) for peer in self._gathering.ranks]
        for peer in self._gathering.engines:
            peer.channel.send({**go, "stores": stores}, deadline)
        self._outlet.join(address, deadline, new=go["new"])


class CollectiveHelper:
    """Another rank's half. Invariant: returns only when the first rank says that every engine has everything."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._lead = sending_ranks(plan.source)[0]
        self._outlet = Outlet(plan, rank)
        self._deadline = Deadline(0.0)

    def send(self, version: Version, tensors: Tensors, deadline_s: float) -> Receipt:
        """Broadcast this rank's pieces. TransferFailed says what the first rank knows about a failure."""
        deadline = self._deadline = Deadline(deadline_s)
        if not self._outlet.items:
            return Receipt(version=version, checksums={})
        channel = connect(self._plan.source.address, self._plan.details["port"], deadline)
        if channel is None:
            raise TransferFailed(
                f"trainer rank {self._lead} did not begin version {version} within {deadline.seconds:g} s,"
                f" so rank {self._rank} could not send its part"
            )
        try:
            checksums, size = self._exchange(channel, version, tensors, deadline)
        except (PeerLost, OSError) as error:
            self._outlet.drop()
            raise TransferFailed(self._cause(channel, version, deadline, error)) from error
        except BaseException as error:
            self._outlet.drop()
            failed = str(error) or type(error).__name__
            channel.try_send({"failed": failed})
            if isinstance(error, TransferFailed) or not isinstance(error, Exception):
                raise
            raise TransferFailed(f"trainer rank {self._rank} gave up version {version}: {failed}") from error
        finally:
            channel.close()
        return Receipt(version=version, checksums=checksums, num_bytes=size, seconds=deadline.elapsed_s)

    def interrupt(self) -> None:
        """Wait no longer for the first rank."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._outlet.drop()

    def _exchange(
        self, channel: Channel, version: Version, tensors: Tensors, deadline: Deadline
    ) -> tuple[dict[str, int], int]:
        hello = {"uid": self._plan.uid, "rank": self._rank, "version": version, **self._outlet.offer()}
        channel.send(hello, deadline)
        go = self._hear("go", channel, version, deadline)
        address = env.node_address()
        if go["new"]:
            channel.send({"store": self._outlet.open(go["go"], address, deadline)}, deadline)
        self._outlet.join(address, deadline, new=go["new"])
        checksums, size = self._outlet.send(tensors, delta=go["delta"])
        channel.send({"done": version}, deadline)
        self._hear("done", channel, version, deadline)
        self._outlet.held = go["transfer"]
        return checksums, size

    def _hear(self, what: str, channel: Channel, version: Version, deadline: Deadline) -> dict[str, Any]:
        try:
            told = channel.receive(deadline)
        except TimeoutError:
            raise TransferFailed(
                f"trainer rank {self._lead} did not finish version {version} within {deadline.seconds:g} s"
            ) from None
        if what not in told:
            raise TransferFailed(f"trainer rank {self._lead} gave up version {version}: {told.get('failed')}")
        return told

    def _cause(self, channel: Channel, version: Version, deadline: Deadline, error: Exception) -> str:
        """Report that the fault is not ours, and say what the first rank says about the failure."""
        channel.try_send({"broken": str(error)})
        try:
            told = channel.receive(Deadline(2 * REPORT_S))
        except TimeoutError:
            late = f" ({deadline.seconds:g} s are over)" if deadline.left_s == 0 else ""
            return (
                f"the connection broke while trainer rank {self._rank} sent version {version}{late},"
                f" and trainer rank {self._lead} does not answer: {error}"
            )
        except OSError:
            return f"trainer rank {self._lead} is gone, before version {version} had arrived"
        return f"trainer rank {self._lead} gave up version {version}: {told.get('failed', error)}"
