"""The least that weights through shared memory cost: the same copies by the same processes, and nothing to rely on.

Ranks cast their pieces into one segment and count them, the engine copies behind them. No version is ever refused,
nobody who dies is noticed, what is read may be overwritten, nothing is checked: what AReaL's road takes longer is the
price of its promises, and the rest is this machine's memory.
"""

from __future__ import annotations

import mmap
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from areal.contracts.transfer import Layout, Plan, Receipt, pieces_of

ROOT = Path("/dev/shm")
POLL_S = 0.0002
STRIDE = 8
"""Counts of 8 bytes stand this far apart, so that no two ranks write into one cache line."""
ALIGNMENT = 64


class Shared:
    """The segment of a plan. Invariant: counts only rise, so a segment serves one version after the other."""

    def __init__(self, plan: Plan) -> None:
        self.path = Path(str(plan.details["path"]))
        self.source = plan.source
        self.num_tensors = len(plan.source.tensors)
        ends = [0]
        for spec in plan.source.tensors:
            ends.append(ends[-1] + -(-2 * prod(spec.shape) // ALIGNMENT) * ALIGNMENT)
        size = ends[-1] + 8 * STRIDE * plan.source.num_ranks
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(handle, 0, size)
        memory = mmap.mmap(handle, size)
        os.close(handle)
        self.tensors = [
            torch.frombuffer(memory, dtype=torch.bfloat16, count=prod(spec.shape), offset=at).view(spec.shape)
            for spec, at in zip(plan.source.tensors, ends, strict=False)
        ]
        self.counts = np.frombuffer(memory, dtype=np.uint64, offset=ends[-1])[::STRIDE]


class BareSender:
    """Invariant: a piece is counted after it was copied."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._shared, self._rank = Shared(plan), rank

    def send(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Receipt:
        """Cast this rank's pieces into place; nobody waits for anybody, so there is no deadline to miss."""
        shared, first = self._shared, version * self._shared.num_tensors
        pieces = pieces_of(shared.source, self._rank)
        for piece, (_, tensor) in zip(pieces, tensors, strict=True):
            shared.tensors[piece.tensor][piece.box].copy_(tensor)
            shared.counts[self._rank] = first + piece.tensor + 1
        shared.counts[self._rank] = first + shared.num_tensors
        return Receipt(version=version, checksums={}, num_bytes=sum(2 * prod(piece.shape) for piece in pieces))

    def close(self) -> None:
        """Nothing to tell anybody."""


class BareReceiver:
    """Invariant: yields a tensor after all ranks have counted it."""

    def __init__(self, plan: Plan) -> None:
        self._shared = Shared(plan)

    def receive(self, version: int, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor as it is written, without a copy; TimeoutError."""
        shared, end = self._shared, time.monotonic() + deadline_s
        whole = 0
        for index, spec in enumerate(shared.source.tensors):
            while whole <= index:
                whole = int(shared.counts.min()) - version * shared.num_tensors
                if whole <= index:
                    if time.monotonic() > end:
                        raise TimeoutError(f"the trainer did not write {spec.name} within {deadline_s:g} s")
                    time.sleep(POLL_S)
            yield spec.name, shared.tensors[index]

    def close(self) -> None:
        self._shared.path.unlink(missing_ok=True)


class BareResharder:
    """Invariant: for a sound machine and one engine only."""

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        uid = uuid.uuid4().hex
        return Plan(uid=uid, source=source, targets=tuple(targets), details={"path": str(ROOT / f"bare-{uid}")})

    def sender(self, plan: Plan, rank: int = 0) -> BareSender:
        return BareSender(plan, rank)

    def receiver(self, plan: Plan, member: int) -> BareReceiver:
        return BareReceiver(plan)
