"""Where the ranks of a trainer meet: a port of rank 0's machine."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

from areal.contracts.transfer import local_address
from areal.errors import TrainerLost


class Rendezvous:
    """A port on all addresses of this machine. Invariant: until `release` no other program can take it."""

    def __init__(self) -> None:
        # Bound and not listened on: nobody is given it, and nobody finds it open.
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        host = local_address()
        port = self._socket.getsockname()[1]
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """``host:port``, the host as other machines of the cluster reach this one."""

    def release(self) -> None:
        """Let the backend listen there. Idempotent."""
        self._socket.close()


@contextmanager
def meeting_at(where: str) -> Generator[None]:
    """Let a port that was taken in the moment after its release be TrainerLost: the next trainer gets another."""
    try:
        yield
    except Exception as error:
        if not where or not any(sign in str(error) for sign in ("EADDRINUSE", "ddress already in use")):
            raise
        raise TrainerLost(
            f"the trainer's ranks could not meet at {where}: another program has just taken the port; start again, and "
            "another one is chosen"
        ) from error
