"""Weights through a process group of the trainer's rank 0 and the engines.

    receivers                         sender
    connect to the plan's port  --->  accepts until all members asked for this version
                                <---  go: the group to use, and where its store is when it is new
    broadcasts                  <===  buckets
    done                        --->  returns once every member has everything

Whoever fails drops its connections; that ends the broadcasts of all others at once.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from areal.builtins.resharders.bucket import receive_buckets, send_buckets
from areal.builtins.resharders.control import Channel, accept, connect, listen
from areal.builtins.resharders.group import SENDER_RANK, Group, PeerLost
from areal.builtins.resharders.wire import Deadline, num_bytes, wire_specs
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan, Receipt
from areal.errors import TransferFailed

# After a broken broadcast the living report at once; a member silent for so long is the one that broke it.
REPORT_S = 2.0


class CollectiveSender:
    """Invariant: returns only when every engine has every byte; on failure no engine waits for it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs = wire_specs(plan)
        self._indices = range(len(plan.targets))
        self._listener: socket.socket | None = None
        self._group: Group | None = None
        self._token = ""
        self._deadline = Deadline(0.0)

    def send(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Broadcast all tensors in buckets; TransferFailed names the engines that are missing, gone or gave up."""
        deadline = self._deadline = Deadline(deadline_s)
        members: dict[int, Channel] = {}
        try:
            group = self._meet(members, self._gather(version, members, deadline), deadline)
            bucket_bytes = self._plan.details["bucket_bytes"]
            checksums = send_buckets(group, self._specs, tensors, bucket_bytes, group.device)
            self._confirm(version, members, deadline)
        except BaseException as error:
            self._drop()
            reason = self._reason(members, deadline, error)
            for channel in members.values():
                _try_send(channel, {"failed": reason})
            if isinstance(error, TransferFailed) or not isinstance(error, Exception):
                raise
            raise TransferFailed(f"the trainer's sender gave up version {version}: {reason}") from error
        finally:
            for channel in members.values():
                channel.close()
        size = sum(map(num_bytes, self._specs))
        return Receipt(version=version, checksums=checksums, num_bytes=size, seconds=deadline.elapsed_s)

    def interrupt(self) -> None:
        """Wait no longer for receivers that have not come."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the group and give the port back. Idempotent."""
        self._drop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _gather(self, version: Version, members: dict[int, Channel], deadline: Deadline) -> set[str]:
        """Fill `members` with one channel per engine; return the groups that they hold ("" for none)."""
        listener = self._listen()
        tokens: dict[int, str] = {}
        while missing := [index for index in self._indices if index not in members]:
            try:
                arrival = accept(listener, deadline)
            except TimeoutError:
                raise TransferFailed(
                    f"{self._names(missing)} did not join the transfer of version {version}"
                    f" within {deadline.seconds:g} s"
                ) from None
            if arrival is None:
                continue
            channel, hello = arrival
            member = hello.get("member")
            if hello.get("uid") != self._plan.uid or not isinstance(member, int) or member not in self._indices:
                channel.close()
            elif hello.get("version") != version:
                asked = hello.get("version")
                _try_send(channel, {"failed": f"version {asked} was asked for while version {version} is sent"})
                channel.close()
            elif channel.is_open():  # otherwise it stems from a receiver that gave up before we came
                if member in members:
                    members[member].close()
                members[member], tokens[member] = channel, str(hello.get("group"))
        return set(tokens.values())

    def _listen(self) -> socket.socket:
        if self._listener is None:
            address, port = self._plan.source.address, self._plan.details["port"]
            try:
                self._listener = listen(address, port)
            except OSError as error:
                raise TransferFailed(
                    f"the trainer cannot listen at {address}:{port}: {os.strerror(error.errno or 0)}; make a new plan"
                ) from error
        return self._listener

    def _meet(self, members: dict[int, Channel], tokens: set[str], deadline: Deadline) -> Group:
        """Return the group of all members: the one everybody holds, or a new one."""
        if self._group is not None and tokens == {self._token}:
            self._group.begin(deadline)
            for channel in members.values():
                channel.send({"go": self._token}, deadline)
            return self._group
        self._drop()
        address = self._plan.source.address
        group = Group(self._plan.details["collective"], address, 0, SENDER_RANK, len(members) + 1, deadline)
        self._group, self._token = group, uuid.uuid4().hex
        for channel in members.values():
            channel.send({"go": self._token, "port": group.port}, deadline)
        group.join(address)
        return group

    def _confirm(self, version: Version, members: dict[int, Channel], deadline: Deadline) -> None:
        for index, channel in members.items():
            try:
                told = channel.receive(deadline)
            except TimeoutError:
                raise TransferFailed(
                    f"{self._names([index])} did not confirm version {version} within {deadline.seconds:g} s"
                ) from None
            if "done" not in told:
                raise PeerLost(f"{self._names([index])} gave up: {told.get('failed', 'its connection broke')}")

    def _reason(self, members: dict[int, Channel], deadline: Deadline, error: BaseException) -> str:
        """Say in a few words why the transfer broke, and which engines are to blame."""
        if not isinstance(error, PeerLost | OSError):
            return str(error) or type(error).__name__
        causes: list[str] = []
        window = Deadline(REPORT_S)
        for index, channel in members.items():
            try:
                told = channel.receive(window)
            except TimeoutError:
                causes.append(f"{self._names([index])} does not answer")
            except OSError:
                causes.append(f"{self._names([index])} is gone")
            else:
                if "failed" in told:
                    causes.append(f"{self._names([index])} gave up: {told['failed']}")
        late = f" ({deadline.seconds:g} s are over)" if deadline.left_s == 0 else ""
        return (", ".join(causes) or str(error)) + late

    def _names(self, members: Iterable[int]) -> str:
        return ", ".join(f"engine {index} ({self._plan.targets[index].address})" for index in members)

    def _drop(self) -> None:
        if self._group is not None:
            self._group.drop()
            self._group = None


class CollectiveReceiver:
    """Invariant: leaves the group on any failure, so that neither the sender nor other engines wait for it."""

    def __init__(self, plan: Plan, member: int) -> None:
        self._plan = plan
        self._member = member
        self._deadline = Deadline(0.0)
        self._specs = wire_specs(plan)
        self._group: Group | None = None
        self._token = ""

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in the memory that the collective moves: the CPU's for gloo; TransferFailed."""
        self._deadline = Deadline(deadline_s)
        return self._read(version, self._deadline)

    def interrupt(self) -> None:
        """Wait no longer."""
        self._deadline.end()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self._group is not None:
            self._group.drop()
            self._group = None

    def _read(self, version: Version, deadline: Deadline) -> Iterator[tuple[str, torch.Tensor]]:
        address, port = self._plan.source.address, self._plan.details["port"]
        channel = connect(address, port, deadline)
        if channel is None:
            raise TransferFailed(
                f"the trainer's sender did not open {address}:{port} for version {version}"
                f" within {deadline.seconds:g} s"
            )
        has_all = False

        def arrived() -> None:
            nonlocal has_all
            channel.send({"done": version}, deadline)
            has_all = True

        try:
            group = self._join(channel, version, deadline)
            yield from receive_buckets(group, self._specs, self._plan.details["bucket_bytes"], group.device, arrived)
        except (PeerLost, OSError) as error:
            self.close()
            raise TransferFailed(self._cause(channel, version, deadline, error)) from error
        finally:
            if not has_all:  # the consumer stopped reading, or the transfer was refused
                self.close()
                _try_send(channel, {"failed": f"it stopped reading version {version}"})
            channel.close()

    def _join(self, channel: Channel, version: Version, deadline: Deadline) -> Group:
        """Ask for the version and return the group that the sender names."""
        held = self._token if self._group is not None else ""
        hello = {"uid": self._plan.uid, "member": self._member, "version": version, "group": held}
        channel.send(hello, deadline)
        try:
            told = channel.receive(deadline)
        except TimeoutError:
            raise TransferFailed(
                f"the trainer's sender did not start version {version} within {deadline.seconds:g} s"
            ) from None
        if "go" not in told:
            raise TransferFailed(f"the trainer's sender refused version {version}: {told.get('failed')}")
        if self._group is not None and told["go"] == held:
            self._group.begin(deadline)
            return self._group
        self.close()
        collective, size = self._plan.details["collective"], len(self._plan.targets) + 1
        group = Group(collective, self._plan.source.address, told["port"], self._member + 1, size, deadline)
        self._group, self._token = group, told["go"]
        group.join(self._plan.targets[self._member].address)
        return group

    def _cause(self, channel: Channel, version: Version, deadline: Deadline, error: Exception) -> str:
        """Report to the sender that the fault is not ours, and say what it says about the failure."""
        if deadline.left_s == 0:
            return f"version {version} did not arrive from the trainer's sender within {deadline.seconds:g} s"
        _try_send(channel, {"broken": str(error)})
        try:
            told: dict[str, Any] = channel.receive(Deadline(2 * REPORT_S))
        except TimeoutError:
            return f"the connection broke while the trainer's sender sent version {version}: {error}"
        except OSError:
            return f"the trainer's sender is gone, before version {version} had arrived"
        return f"the trainer's sender gave up version {version}: {told.get('failed', error)}"


def _try_send(channel: Channel, message: dict[str, Any]) -> None:
    """Tell a peer that may be gone; nobody waits for the answer."""
    with suppress(OSError):
        channel.send(message, Deadline(1.0))
