"""Bucketed broadcast: tensors as one stream of bytes, cut into pieces that fit a bucket.

Small tensors are packed together; a tensor as large as a bucket travels in slices of its own memory, uncopied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from areal.builtins.resharders.wire import as_bytes, checked, num_bytes, torch_dtype
from areal.contracts.transfer import TensorSpec, checksum


class Wire(Protocol):
    """The group as buckets see it. Invariant: `wait` ends the oldest broadcast that was started."""

    def start(self, buffer: torch.Tensor) -> None: ...

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of one tensor. Invariant: the pieces of a schedule cover each byte once, in order."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def schedule(sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[Piece]]:
    """Yield buckets of at most `bucket_bytes` for tensors of so many bytes; empty tensors need none."""
    bucket: list[Piece] = []
    filled = 0
    for tensor, size in enumerate(sizes):
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        if size >= bucket_bytes:
            yield from ([Piece(tensor, at, min(at + bucket_bytes, size))] for at in range(0, size, bucket_bytes))
        elif size:
            bucket.append(Piece(tensor, 0, size))
            filled += size
    if bucket:
        yield bucket


class Outgoing:
    """The sender's tensors, cast when they are needed. Invariant: holds only those that are not wholly sent."""

    def __init__(
        self, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> None:
        self._stream = checked(specs, tensors)
        self._device = device
        self._held: dict[int, tuple[str, torch.Tensor]] = {}
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)
        self._num_taken = 0
        self._num_summed = 0

    def bucket(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the bytes of these pieces [sum of sizes], valid until the next call."""
        for index in [index for index in self._held if index < pieces[0].tensor]:
            del self._held[index]
        while self._num_taken <= pieces[-1].tensor and self._take():
            pass
        parts = [as_bytes(self._held[piece.tensor][1])[piece.start : piece.stop] for piece in pieces]
        if len(parts) == 1:
            return parts[0]
        size = sum(piece.size for piece in pieces)
        if self._packed.numel() < size:
            self._packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        return torch.cat(parts, out=self._packed[:size])

    def checksums(self) -> dict[str, int]:
        """Return the CRC-32 of the tensors taken since the last call."""
        fresh = {name: checksum(tensor) for index, (name, tensor) in self._held.items() if index >= self._num_summed}
        self._num_summed = self._num_taken
        return fresh

    def finish(self) -> None:
        """Take what is left: empty tensors, or the one that should not be there."""
        while self._take():
            pass

    def _take(self) -> bool:
        spec, tensor = next(self._stream, (None, None))
        if spec is None or tensor is None:
            return False
        cast = tensor.to(device=self._device, dtype=torch_dtype(spec.dtype)).contiguous()
        self._held[self._num_taken] = (spec.name, cast)
        self._num_taken += 1
        return True


def send_buckets(
    wire: Wire,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    device: torch.device,
) -> dict[str, int]:
    """Broadcast all tensors and return their checksums, made while the bytes travel."""
    outgoing = Outgoing(specs, tensors, device)
    checksums: dict[str, int] = {}
    for pieces in schedule([num_bytes(spec) for spec in specs], bucket_bytes):
        wire.start(outgoing.bucket(pieces))
        checksums |= outgoing.checksums()
        wire.wait()
    outgoing.finish()
    return checksums | outgoing.checksums()


class Incoming:
    """The receiver's tensors while their bytes arrive. Invariant: yields them in order, each once."""

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self._specs = specs
        self._device = device
        self._flat: dict[int, torch.Tensor] = {}
        self._num_yielded = 0

    def buffer(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the memory [sum of sizes] for these pieces; the tensors will be views of it."""
        first = pieces[0]
        if len(pieces) == 1 and first.tensor not in self._flat:
            self._flat[first.tensor] = self._bytes(num_bytes(self._specs[first.tensor]))
        if len(pieces) == 1:
            return self._flat[first.tensor][first.start : first.stop]
        buffer = self._bytes(sum(piece.size for piece in pieces))
        for piece, part in zip(pieces, buffer.split([piece.size for piece in pieces]), strict=True):
            self._flat[piece.tensor] = part
        return buffer

    def whole(self, last: Piece | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what became whole when `last` arrived; None: everything that is left."""
        end = len(self._specs)
        if last is not None:
            end = last.tensor + (last.stop == num_bytes(self._specs[last.tensor]))
        for index in range(self._num_yielded, end):
            self._num_yielded += 1
            spec = self._specs[index]
            flat = self._flat.pop(index) if index in self._flat else self._bytes(0)
            if flat.storage_offset() % torch_dtype(spec.dtype).itemsize:  # mixed dtypes packed into one bucket
                flat = flat.clone()
            yield spec.name, flat.view(torch_dtype(spec.dtype)).view(spec.shape)

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def receive_buckets(
    wire: Wire, specs: Sequence[TensorSpec], bucket_bytes: int, device: torch.device, arrived: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor when its last byte is there; `arrived` is called once, when nothing more will come.

    The next bucket is under way while the consumer works on the tensors of this one.
    """
    incoming = Incoming(specs, device)
    buckets = list(schedule([num_bytes(spec) for spec in specs], bucket_bytes))
    if buckets:
        wire.start(incoming.buffer(buckets[0]))
    for number, pieces in enumerate(buckets):
        wire.wait()
        if number + 1 < len(buckets):
            wire.start(incoming.buffer(buckets[number + 1]))
            yield from incoming.whole(pieces[-1])
    arrived()
    yield from incoming.whole(None)
