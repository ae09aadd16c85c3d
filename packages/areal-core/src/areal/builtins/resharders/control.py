"""The control road beside process groups: one TCP connection per receiver or rank and transfer, JSON lines both ways.

torch's own store cannot serve here: reading from it blocks for ever while the process that hosts it is frozen, and
it does not say which member is gone. A closed connection does.
"""

from __future__ import annotations

import json
import random
import socket
from contextlib import suppress
from typing import Any

from areal.builtins.resharders.wire import Deadline

# Below the range from which Linux takes ports for outgoing connections, so that none of those gets in the way.
PORTS = range(20000, 32768)
# Not the seeded generator: two runs with one seed on one machine would choose the same port.
_chance = random.SystemRandom()
# A process that is up writes its line at once; more is a stranger on our port.
HELLO_S = 5.0
# A deadline may be ended from another thread; between two looks at it a listener waits so long.
LISTEN_S = 0.2


class Channel:
    """Invariant: no call lasts longer than its deadline, and a lost peer is a ConnectionError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    def send(self, message: dict[str, Any], deadline: Deadline) -> None:
        """Send one message. Raises ConnectionError, TimeoutError."""
        self._connection.settimeout(max(deadline.left_s, 0.001))
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: Deadline) -> dict[str, Any]:
        """Return the next message. Raises ConnectionError when the peer is gone, TimeoutError."""
        while b"\n" not in self._read:
            self._connection.settimeout(min(max(deadline.left_s, 0.001), LISTEN_S))
            try:
                part = self._connection.recv(65536)
            except TimeoutError:
                if deadline.left_s == 0:
                    raise
                continue
            if not part:
                raise ConnectionError("the connection was closed")
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("the other side speaks another protocol")
        return message

    def try_send(self, message: dict[str, Any]) -> None:
        """Tell a peer that may be gone; nobody waits for the answer."""
        with suppress(OSError):
            self.send(message, Deadline(1.0))

    def is_open(self) -> bool:
        """Whether the peer has not closed the connection."""
        self._connection.setblocking(False)
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._connection.close()


def free_port(address: str) -> int:
    """Return a port that nobody uses at `address`; unchecked when the address is another machine's."""
    while True:
        port = _chance.choice(PORTS)
        with socket.socket(_family(address)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if "in use" in str(error):
                    continue
            return port


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; OSError when the port was taken meanwhile."""
    return socket.create_server((address, port), family=_family(address), backlog=1024)


def accept(listener: socket.socket, deadline: Deadline) -> tuple[Channel, dict[str, Any]] | None:
    """Return the next peer and its first message; None when nobody came for a moment, or a stranger did.

    Raises TimeoutError.
    """
    listener.settimeout(min(max(deadline.left_s, 0.001), LISTEN_S))
    try:
        channel = Channel(listener.accept()[0])
    except TimeoutError:
        if deadline.left_s == 0:
            raise
        return None
    try:
        return channel, channel.receive(Deadline(min(HELLO_S, max(deadline.left_s, 0.001))))
    except OSError:
        channel.close()
        return None


def connect(address: str, port: int, deadline: Deadline) -> Channel | None:
    """Connect as soon as somebody listens; None when nobody did in time."""

    def look() -> Channel | None:
        try:
            return Channel(socket.create_connection((address, port), timeout=max(deadline.left_s, 0.001)))
        except OSError:
            return None

    return deadline.poll(look)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
