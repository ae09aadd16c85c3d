"""A process group of its own beside any default group of torch.distributed, for one set of members."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from areal.builtins.resharders.wire import Deadline
from areal.errors import TransferFailed, first_line

# torch's type stubs leave out the classes below `init_process_group`.
c10d: Any = dist

SENDER_RANK = 0
# All members stand at the door when the group is made; a member that needs longer than this died on the way.
RENDEZVOUS_S = 30.0


class PeerLost(Exception):
    """A member died, left, or stood still past the deadline. Invariant: raised by a `Group` only."""


def group_device(collective: str) -> torch.device:
    """Return the device whose memory a backend of torch.distributed moves: the CPU where it can."""
    devices = dist.Backend.backend_capability.get(collective, [])
    if not devices:
        known = ", ".join(sorted(dist.Backend.backend_capability))
        raise TransferFailed(
            f"the plan asks for collective {collective!r}, but torch.distributed knows {known};"
            " import the library that brings it, or use another accelerator"
        )
    return torch.device("cpu" if "cpu" in devices else devices[0])


class Group:
    """Broadcasts from the sender. Invariant: after `drop` no connection is open, so every peer notices.

    Neither the group nor its works are ever held by a local variable: the traceback of an error would keep them, and
    with them the connections, alive.
    """

    def __init__(self, collective: str, address: str, port: int, rank: int, size: int, deadline: Deadline) -> None:
        """Open the store (rank 0, on a free port when `port` is 0) or connect to it; PeerLost, TransferFailed."""
        self.device = group_device(collective)
        self.rank, self.size = rank, size
        self._make = _maker(collective)
        self._deadline = deadline
        self._works: deque[Any] = deque()
        self._backend: Any = None
        self._store: Any = None
        try:
            self._store = c10d.TCPStore(
                address, port, is_master=rank == SENDER_RANK, wait_for_workers=False, timeout=self._rendezvous_time()
            )
        except RuntimeError as error:
            raise PeerLost(f"the store at {address}:{port} cannot be reached: {first_line(error)}") from error

    @property
    def port(self) -> int:
        return self._store.port

    def join(self, address: str) -> None:
        """Return once all members are connected; `address` is where the others reach this one. PeerLost."""
        time = self._rendezvous_time()
        try:
            self._backend = self._make(self._store, self.rank, self.size, time, address)
        except RuntimeError as error:
            raise PeerLost(first_line(error)) from error

    def begin(self, deadline: Deadline) -> None:
        """Bind the following broadcasts to another deadline."""
        self._deadline = deadline

    def start(self, buffer: torch.Tensor) -> None:
        """Start the broadcast of `buffer` (uint8, contiguous, on `device`). PeerLost."""
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        options.timeout = self._time_left()
        try:
            self._works.append(self._backend.broadcast([buffer], options))
        except RuntimeError as error:
            raise PeerLost(first_line(error)) from error

    def wait(self) -> None:
        """Wait for the oldest broadcast; PeerLost when a member is gone or the deadline passes."""
        try:
            if self.device.type == "cpu":
                self._works.popleft().wait()
            else:  # without a time the host would go on at once and nobody would notice a lost peer
                self._works.popleft().wait(self._time_left())
        except RuntimeError as error:
            raise PeerLost(first_line(error)) from error

    def drop(self) -> None:
        """Close all connections. Idempotent."""
        self._works.clear()
        self._backend = None
        self._store = None

    def _time_left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline.left_s, 0.001))

    def _rendezvous_time(self) -> timedelta:
        return min(self._time_left(), timedelta(seconds=RENDEZVOUS_S))


def _maker(collective: str) -> Callable[..., Any]:
    """Return (store, rank, size, timeout, address) -> a backend that is registered nowhere.

    The default group of the process stays as it is. Raises TransferFailed for a collective without such a way.
    """
    if collective == "gloo":
        return _make_gloo
    if collective == "nccl":
        return _make_nccl
    plugin = c10d.Backend._plugins.get(collective.upper())
    if plugin is None:
        raise TransferFailed(
            f"the plan asks for collective {collective!r}, which cannot be made beside torch's default group;"
            " use gloo, nccl or one that a library registers with torch.distributed.Backend"
        )
    return partial(_make_registered, plugin)


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options.group_name = _name(store)
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Not tested: no test machine has a GPU."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = _name(store)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _make_registered(plugin: Any, store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    described = c10d.distributed_c10d._DistributedBackendOptions()
    described.store, described.group_rank, described.group_size = store, rank, size
    described.timeout, described.group_id = timeout, _name(store)
    described.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(described, None)


def _name(store: Any) -> str:
    """Return what all members call the group, for records of collectives."""
    return f"weights_{store.port}"
