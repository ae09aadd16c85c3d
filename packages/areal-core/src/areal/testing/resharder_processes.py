"""The processes in which the kit of resharders runs both halves, and the weights that they send."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import pytest

from areal.contracts.component import Component
from areal.contracts.resharder import Lasting, Takes
from areal.contracts.transfer import Layout, Piece, Plan, Receipt, TensorSpec, checksum, piece_name, pieces_of
from areal.errors import TransferFailed

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

# Long enough for a loaded machine; no passing case waits for it.
DEADLINE_S = 60.0
# For the cases in which somebody is missing: they last this long.
SHORT_S = 1.5
# What a process may add to its deadline before it counts as hanging.
SLACK_S = 20.0
# Awkward on purpose: a scalar, an empty tensor, a transposed one, integers, and enough bytes for several sends.
TENSORS = (
    *(TensorSpec(name=f"layers.{i}.weight", shape=(512, 1024), dtype="float32") for i in range(6)),
    TensorSpec(name="scale", shape=(), dtype="float32"),
    TensorSpec(name="empty", shape=(0, 8), dtype="float32"),
    TensorSpec(name="transposed", shape=(33, 65), dtype="float32"),
    TensorSpec(name="half", shape=(7, 5), dtype="bfloat16"),
    TensorSpec(name="steps", shape=(3,), dtype="int64"),
    TensorSpec(name="norm.weight", shape=(129,), dtype="float32"),
)
# By rows, uneven, one rank without; by columns; in two dimensions; replicated, so that one rank owns it; and the rest.
CUTS: dict[str, tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]] = {
    "layers.0.weight": ((0, (0, 0), (200, 1024)), (1, (200, 0), (312, 1024))),
    "layers.1.weight": ((0, (0, 0), (512, 400)), (1, (0, 400), (512, 24)), (2, (0, 424), (512, 600))),
    "layers.2.weight": (
        (0, (0, 0), (256, 700)), (1, (256, 0), (256, 700)), (1, (0, 700), (256, 324)), (2, (256, 700), (256, 324)),
    ),
    "layers.3.weight": ((1, (0, 0), (512, 1024)),),
    "layers.4.weight": ((0, (0, 0), (171, 1024)), (1, (171, 0), (171, 1024)), (2, (342, 0), (170, 1024))),
    "layers.5.weight": ((2, (0, 0), (512, 1024)),),
    "scale": ((2, (), ()),),
    "empty": ((1, (0, 0), (0, 8)),),
    "transposed": ((0, (0, 0), (33, 1)), (2, (0, 1), (33, 64))),
    "half": ((0, (0, 0), (7, 3)), (1, (0, 3), (7, 2))),
    "steps": ((0, (0,), (3,)),),
    "norm.weight": ((0, (0,), (43,)), (1, (43,), (43,)), (2, (86,), (43,))),
}  # fmt: skip
"""For each tensor (rank, start, shape) of its boxes."""
NUM_RANKS = 4
"""The last rank has no pieces."""
Arrival = tuple[str, tuple[int, ...], str, int]
"""Name, shape, dtype and checksum of one tensor."""


def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield TENSORS with values that depend on `seed` only."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for spec in TENSORS:
        values = torch.randn(prod(spec.shape), generator=generator) * 100
        if spec.name == "transposed":
            yield spec.name, values.reshape(spec.shape[::-1]).T
        else:
            yield spec.name, values.reshape(spec.shape).to(getattr(torch, spec.dtype))


def pieces() -> tuple[tuple[Piece, ...], ...]:
    """Return CUTS as a layout has them."""
    ranks: list[list[Piece]] = [[] for _ in range(NUM_RANKS)]
    for index, spec in enumerate(TENSORS):
        for rank, start, shape in CUTS[spec.name]:
            ranks[rank].append(Piece(tensor=index, start=start, shape=shape))
    return tuple(map(tuple, ranks))


def expected_checksums(seed: int, dtype: str, layout: Layout) -> dict[str, int]:
    """Return what the receipts of all ranks of a sender say together, when the engines hold `dtype`."""
    import torch

    cast = [t.to(getattr(torch, dtype)) if t.is_floating_point() else t for _, t in weights(seed)]
    return {
        piece_name(TENSORS[piece.tensor], piece): checksum(cast[piece.tensor][piece.box])
        for rank in range(layout.num_ranks)
        for piece in pieces_of(layout, rank)
    }


@cache
def expected(seed: int, dtype: str) -> list[Arrival]:
    """Return what a receiver of `dtype` must see."""
    import torch

    arrivals: list[Arrival] = []
    for name, tensor in weights(seed):
        cast = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        arrivals.append(describe(name, cast))
    return arrivals


def describe(name: str, tensor: Tensor) -> Arrival:
    return name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor)


def _in_halves(sender: Takes, version: int, tensors: Iterable[tuple[str, Tensor]], deadline_s: float) -> Receipt:
    """Send what changes once it is taken, as a trainer's weights do."""
    own = [(name, tensor.clone()) for name, tensor in tensors]
    sender.take(version, own, deadline_s)
    for _, tensor in own:
        tensor.zero_()
    return sender.deliver()


class Halves:
    """Lives in a child process. Invariant: one half per plan and role, kept as a worker would keep it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[tuple[str, int], Any] = {}
        self._kept: list[tuple[str, Tensor]] = []

    def send(
        self, half: tuple[Component, Any, Plan], version: int, deadline_s: float, fault: str, rank: int = 0
    ) -> dict[str, Any]:
        sent = self._stream(version, fault, half[2].source, rank)
        sender = self._half(half, -1 - rank)
        in_halves = isinstance(sender, Takes) and not fault and version % 2 == 1
        send = partial(_in_halves, sender) if in_halves else sender.send
        receipt: Receipt = send(version, sent, deadline_s)
        return {"version": receipt.version, "checksums": dict(receipt.checksums), "num_bytes": receipt.num_bytes}

    def receive(
        self, half: tuple[Component, Any, Plan], member: int, version: int, deadline_s: float, fault: str
    ) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for name, tensor in self._half(half, member).receive(version, deadline_s):
            arrivals.append(describe(name, tensor))
            if fault == "stall":
                self._stall()
        return arrivals

    def keep(self, half: tuple[Component, Any, Plan], member: int, version: int, deadline_s: float) -> bool:
        """Hold what arrives; return whether it is said to last."""
        receiver = self._half(half, member)
        self._kept = list(receiver.receive(version, deadline_s))
        return isinstance(receiver, Lasting)

    def kept(self) -> list[Arrival]:
        """Say what has become of what `keep` holds, and let it go."""
        found, self._kept = [describe(name, tensor) for name, tensor in self._kept], []
        return found

    def close(self) -> None:
        """Close every half twice: the second time must be harmless."""
        for half in [*self._held.values()] * 2:
            half.close()
        self._held.clear()

    def _half(self, half: tuple[Component, Any, Plan], member: int) -> Any:
        component, options, plan = half
        if (plan.uid, member) not in self._held:
            resharder = component.load()(options, "")
            made = resharder.sender(plan, -1 - member) if member < 0 else resharder.receiver(plan, member)
            self._held[plan.uid, member] = made
        return self._held[plan.uid, member]

    def _stream(self, version: int, fault: str, source: Layout, rank: int) -> Iterator[tuple[str, Tensor]]:
        wholes = list(weights(version))
        for index, piece in enumerate(pieces_of(source, rank)):
            name, whole = wholes[piece.tensor]
            if index == 2 and fault == "stall":
                self._stall()
            if index == 2 and fault == "raise":
                raise RuntimeError("the source broke")
            yield name, whole[piece.box]

    def _stall(self) -> None:
        self._connection.send(("stalled", None))
        time.sleep(10 * DEADLINE_S)


def serve(connection: Connection) -> None:
    """Do what the parent asks until it hangs up; the body of a child process."""
    halves = Halves(connection)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = ("returned", getattr(halves, method)(*args))
        except TransferFailed as error:
            answer = ("refused", str(error))
        except BaseException:
            answer = ("crashed", traceback.format_exc())
        connection.send(answer)


class Member:
    """One child process as the test sees it. Invariant: `outcome` ends within its deadline."""

    def __init__(self, start_method: str) -> None:
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["torch", "areal.testing.resharder_processes"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def outcome(self, within_s: float = DEADLINE_S + SLACK_S) -> tuple[str, Any]:
        """Return ``(returned | refused | stalled | crashed | died, value)``; fails the test when it hangs."""
        if not self._connection.poll(within_s):
            self.kill()
            pytest.fail(f"a half neither returned nor raised within {within_s:g} s")
        try:
            return self._connection.recv()
        except EOFError:
            return "died", self._process.exitcode

    def value(self, within_s: float = DEADLINE_S + SLACK_S) -> Any:
        """Return what the call returned; fails the test when it did anything else."""
        kind, value = self.outcome(within_s)
        assert kind == "returned", f"{kind}: {value}"
        return value

    def freeze(self) -> None:
        """SIGSTOP: the process stays, and does nothing any more."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, as a node's failure would be."""
        self._process.kill()
        self._process.join()


class Crew:
    """The processes of a test class. Invariant: a killed one is replaced, so that no case sees another's damage."""

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method
        self._members: dict[str, Member] = {}

    def __getitem__(self, name: str) -> Member:
        if name not in self._members:
            self._members[name] = Member(self._start_method)
        return self._members[name]

    def kill(self, name: str) -> None:
        if member := self._members.pop(name, None):
            member.kill()

    def close_halves(self) -> None:
        for member in self._members.values():
            member.ask("close")
            member.value()

    def close(self) -> None:
        for name in list(self._members):
            self.kill(name)
