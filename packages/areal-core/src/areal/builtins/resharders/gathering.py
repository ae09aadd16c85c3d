"""All members of one transfer at the first rank's port: who has come, and who is to blame when it breaks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from areal.builtins.resharders.control import Channel, accept, listen
from areal.builtins.resharders.group import PeerLost
from areal.builtins.resharders.pieces import sending_ranks
from areal.builtins.resharders.wire import Deadline
from areal.contracts.messages import Version
from areal.contracts.transfer import Plan
from areal.errors import TransferFailed

# After a broken broadcast the living report at once; a member silent for so long is the one that broke it.
REPORT_S = 2.0
Key = tuple[str, int]
"""``("rank", 1)`` or ``("member", 0)``: how a member names itself in its first message."""


class Peer:
    """A member of this transfer. Invariant: `told` is the last thing that it said about how the transfer went."""

    def __init__(self, name: str, channel: Channel, hello: dict[str, Any]) -> None:
        self.name = name
        self.channel = channel
        self.hello = hello
        self.told: dict[str, Any] = {}

    def ask(self, what: str, version: Version, deadline: Deadline) -> Any:
        """Return the value under `what` in its next message. PeerLost, ConnectionError, TransferFailed when late."""
        try:
            self.told = self.channel.receive(deadline)
        except TimeoutError:
            raise TransferFailed(
                f"{self.name} did not finish version {version} within {deadline.seconds:g} s"
            ) from None
        if what not in self.told:
            raise PeerLost(f"{self.name} gave up: {self.told.get('failed', 'its connection broke')}")
        return self.told[what]

    def cause(self, window: Deadline) -> str:
        """Return what it has to do with a broken transfer; empty: nothing."""
        if not self.told.keys() & {"failed", "broken", "done"}:
            try:
                self.told = self.channel.receive(window)
            except TimeoutError:
                return f"{self.name} does not answer"
            except OSError:
                return f"{self.name} is gone"
        return f"{self.name} gave up: {self.told['failed']}" if "failed" in self.told else ""


class Gathering:
    """Invariant: one open channel for each member that has asked for this version; `dismiss` closes them all."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._names: dict[Key, str] = {
            ("rank", rank): f"trainer rank {rank}" for rank in sending_ranks(plan.source)[1:]
        }
        for index, target in enumerate(plan.targets):
            self._names["member", index] = f"engine {index} ({target.address})"
        self._peers: dict[Key, Peer] = {}
        self._listener: socket.socket | None = None

    def gather(self, version: Version, deadline: Deadline) -> None:
        """Return when all are there. TransferFailed names those that are not."""
        listener = self._listen()
        while missing := [name for key, name in self._names.items() if key not in self._peers]:
            try:
                arrival = accept(listener, deadline)
            except TimeoutError:
                raise TransferFailed(
                    f"{', '.join(missing)} did not join the transfer of version {version} within {deadline.seconds:g} s"
                ) from None
            if arrival is not None:
                self._admit(*arrival, version)

    @property
    def ranks(self) -> list[Peer]:
        return [self._peers[key] for key in self._names if key[0] == "rank"]

    @property
    def engines(self) -> list[Peer]:
        return [self._peers[key] for key in self._names if key[0] == "member"]

    def reason(self, deadline: Deadline, error: BaseException) -> str:
        """Say in a few words why the transfer broke, and who is to blame."""
        if not isinstance(error, PeerLost | OSError):
            return str(error) or type(error).__name__
        window = Deadline(REPORT_S)
        causes = [cause for peer in self._present() if (cause := peer.cause(window))]
        late = f" ({deadline.seconds:g} s are over)" if deadline.left_s == 0 else ""
        return (", ".join(causes) or str(error)) + late

    def tell(self, peers: Iterable[Peer], message: dict[str, Any]) -> None:
        for peer in peers:
            peer.channel.try_send(message)

    def dismiss(self, reason: str = "") -> None:
        """Let all go, with the reason why the transfer failed if it did."""
        if reason:
            self.tell(self._present(), {"failed": reason})
        for peer in self._present():
            peer.channel.close()
        self._peers.clear()

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _present(self) -> Iterator[Peer]:
        yield from (self._peers[key] for key in self._names if key in self._peers)

    def _admit(self, channel: Channel, hello: dict[str, Any], version: Version) -> None:
        key: Key = ("rank", hello.get("rank", -1)) if "rank" in hello else ("member", hello.get("member", -1))
        if hello.get("uid") != self._plan.uid or key not in self._names:
            channel.close()
        elif hello.get("version") != version:
            asked = hello.get("version")
            channel.try_send({"failed": f"version {asked} was asked for while version {version} is sent"})
            channel.close()
        elif channel.is_open():  # otherwise it stems from a member that gave up before we came
            if key in self._peers:
                self._peers[key].channel.close()
            self._peers[key] = Peer(self._names[key], channel, hello)

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
