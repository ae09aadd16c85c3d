"""Buckets on their way: what each sending rank and each receiver does with them, whole or as deltas.

Whole, a bucket is one broadcast. In a framed transfer two broadcasts make a bucket: eight bytes that say how long its
delta is (0: the bucket comes whole), and the bytes themselves. Framed are transfers with deltas, and where deltas are
possible all transfers through a device's memory, because what is kept of the last version is in the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch

from areal.builtins.resharders.bucket import Incoming, Outgoing, Part, Wire, schedule
from areal.builtins.resharders.delta import Choice, apply, encode
from areal.builtins.resharders.pieces import Item

HEADER_BYTES = 8
Bucket = tuple[int, list[Part]]
"""Stream and parts, as `merged` orders them."""


def send_buckets(
    wire: Wire,
    items: Sequence[Item],
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    device: torch.device,
) -> dict[str, int]:
    """Broadcast all items and return their checksums; the next bucket is made while one travels."""
    outgoing = Outgoing(items, tensors, device)
    checksums: dict[str, int] = {}
    is_under_way = False
    for parts in schedule([item.num_bytes for item in items], bucket_bytes):
        bucket = outgoing.bucket(parts)
        if is_under_way:
            wire.wait()
        wire.start(bucket)
        is_under_way = True
        checksums |= outgoing.checksums()
    if is_under_way:
        wire.wait()
    outgoing.finish()
    return checksums | outgoing.checksums()


def is_framed(device: torch.device, *, delta: bool) -> bool:
    return delta or device.type != "cpu"


class Tracked:
    """A rank's stream that remembers what the receivers hold. Invariant: after a whole `send`, `kept` is what went.

    `num_bytes` counts what the last one put on the wire for each receiver.
    """

    def __init__(self, items: Sequence[Item], choice: Choice) -> None:
        self._items = items
        self._choice = choice
        self.kept = torch.empty(sum(item.num_bytes for item in items), dtype=torch.uint8)
        self.num_bytes = 0

    def send(
        self,
        wire: Wire,
        tensors: Iterable[tuple[str, torch.Tensor]],
        bucket_bytes: int,
        device: torch.device,
        *,
        delta: bool,
    ) -> dict[str, int]:
        """Broadcast all items, as deltas where that pays, and return their checksums."""
        outgoing = Outgoing(self._items, tensors, device)
        framed = is_framed(device, delta=delta)
        checksums: dict[str, int] = {}
        at = self.num_bytes = 0
        for parts in schedule([item.num_bytes for item in self._items], bucket_bytes):
            began = time.perf_counter()
            whole = outgoing.bucket(parts)
            kept = self.kept[at : at + len(whole)]
            at += len(whole)
            taken_s = time.perf_counter() - began
            tried = delta and self._choice.tries()
            changed = self._renew(kept, whole.cpu(), tried=tried)
            body = kept if changed is None else changed
            self._start(wire, body.to(device), is_delta=changed is not None, framed=framed)
            busy_s = time.perf_counter() - began - taken_s
            checksums |= outgoing.checksums()
            began = time.perf_counter()
            for _ in range(1 + framed):
                wire.wait()
            self._choice.took(len(whole), busy_s + time.perf_counter() - began, tried=tried)
        outgoing.finish()
        return checksums | outgoing.checksums()

    def _renew(self, kept: torch.Tensor, whole: torch.Tensor, *, tried: bool) -> torch.Tensor | None:
        changed = encode(kept.numpy(), whole.numpy()) if tried else None
        if changed is None:
            kept.copy_(whole)
            return None
        apply(kept.numpy(), changed)
        return torch.from_numpy(changed)

    def _start(self, wire: Wire, body: torch.Tensor, *, is_delta: bool, framed: bool) -> None:
        if framed:
            header = torch.tensor([len(body) if is_delta else 0], dtype=torch.int64, device=body.device)
            wire.start(header.view(torch.uint8))
            self.num_bytes += HEADER_BYTES
        wire.start(body)
        self.num_bytes += len(body)


def receive_whole(
    wires: Sequence[Wire], incoming: Sequence[Incoming], buckets: Sequence[Bucket], arrived: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor when its last byte is there; `arrived` is called once, when nothing more will come.

    As many buckets as there are ranks are under way while the consumer works on the tensors of one.
    """
    coming = iter(buckets)

    def start(stream: int, parts: list[Part]) -> None:
        wires[stream].start(incoming[stream].buffer(parts))

    for bucket in islice(coming, len(wires)):
        start(*bucket)
    for number, (stream, parts) in enumerate(buckets, 1):
        wires[stream].wait()
        for bucket in islice(coming, 1):
            start(*bucket)
        if number == len(buckets):
            arrived()
        yield from incoming[stream].take(parts)
    if not buckets:
        arrived()


def receive_framed(
    wires: Sequence[Wire],
    incoming: Sequence[Incoming],
    buckets: Sequence[Bucket],
    device: torch.device,
    arrived: Callable[[], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor when its last change is there, like `receive_whole`; the incoming streams have kept memory."""
    reading = _Frames(wires, incoming, device)
    for bucket in buckets[:1]:
        reading.begin(*bucket)
    for number, (stream, parts) in enumerate(buckets, 1):
        reading.finish(stream, parts)
        for bucket in buckets[number : number + 1]:
            reading.begin(*bucket)
        if number == len(buckets):
            arrived()
        yield from incoming[stream].take(parts)
    if not buckets:
        arrived()


class _Frames:
    """Invariant: at most one bucket is between `begin` and `finish`."""

    def __init__(self, wires: Sequence[Wire], incoming: Sequence[Incoming], device: torch.device) -> None:
        self._wires = wires
        self._incoming = incoming
        self._device = device
        self._body = torch.empty(0, dtype=torch.uint8)
        self._is_delta = False
        self._is_direct = False

    def begin(self, stream: int, parts: list[Part]) -> None:
        """Read how long the bucket's delta is and have its bytes come."""
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        self._wires[stream].start(header)
        self._wires[stream].wait()
        size = int(header.cpu().view(torch.int64))
        self._is_delta = size > 0
        whole = self._incoming[stream].buffer(parts)
        size = size or len(whole)
        self._is_direct = not self._is_delta and self._device.type == "cpu"
        self._body = whole if self._is_direct else torch.empty(size, dtype=torch.uint8, device=self._device)
        self._wires[stream].start(self._body)

    def finish(self, stream: int, parts: list[Part]) -> None:
        """Bring the kept bytes up to date."""
        self._wires[stream].wait()
        kept = self._incoming[stream].buffer(parts)
        if self._is_delta:
            apply(kept.numpy(), self._body.cpu().numpy())
        elif not self._is_direct:
            kept.copy_(self._body)
