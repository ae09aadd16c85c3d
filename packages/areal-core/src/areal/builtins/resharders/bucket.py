"""Bucketed broadcast: a rank's items as one stream of bytes, cut into parts that fit a bucket.

Small items are packed together; one as large as a bucket travels in slices of its own memory, uncopied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from areal.builtins.resharders.pieces import Assembly, Item
from areal.builtins.resharders.wire import as_bytes, checked, torch_dtype
from areal.contracts.transfer import TensorSpec, checksum


class Wire(Protocol):
    """The group as buckets see it. Invariant: `wait` ends the oldest broadcast that was started."""

    def start(self, buffer: torch.Tensor) -> None: ...

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `stop` of one item. Invariant: the parts of a schedule cover each byte once, in order."""

    item: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def schedule(sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[Part]]:
    """Yield buckets of at most `bucket_bytes` for items of so many bytes; empty items need none."""
    bucket: list[Part] = []
    filled = 0
    for item, size in enumerate(sizes):
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        if size >= bucket_bytes:
            yield from ([Part(item, at, min(at + bucket_bytes, size))] for at in range(0, size, bucket_bytes))
        elif size:
            bucket.append(Part(item, 0, size))
            filled += size
    if bucket:
        yield bucket


def merged(streams: Sequence[Sequence[Item]], bucket_bytes: int) -> list[tuple[int, list[Part]]]:
    """Return (stream, bucket) of all ranks' streams in the one order in which every receiver takes them.

    By the first tensor of a bucket, then by rank: so tensors become whole one after the other, and few at a time are
    in parts. Each stream's own order stays.
    """
    buckets = [
        (parts_of[0].item, stream, number, parts_of)
        for stream, items in enumerate(streams)
        for number, parts_of in enumerate(schedule([item.num_bytes for item in items], bucket_bytes))
    ]
    buckets.sort(key=lambda bucket: (streams[bucket[1]][bucket[0]].piece.tensor, bucket[1], bucket[2]))
    return [(stream, parts) for _, stream, _, parts in buckets]


class Outgoing:
    """A rank's tensors, cast when they are needed. Invariant: holds only those that are not wholly sent."""

    def __init__(
        self, items: Sequence[Item], tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> None:
        self._items = items
        self._stream = checked([item.spec for item in items], tensors)
        self._device = device
        self._held: dict[int, torch.Tensor] = {}
        self._packed = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self._num_taken = 0
        self._num_summed = 0

    def bucket(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return the bytes of these parts [sum of sizes], valid until the call after the next."""
        for index in [index for index in self._held if index < parts[0].item]:
            del self._held[index]
        while self._num_taken <= parts[-1].item and self._take():
            pass
        pieces = [as_bytes(self._held[part.item])[part.start : part.stop] for part in parts]
        if len(pieces) == 1:
            return pieces[0]
        size = sum(part.size for part in parts)
        packed, other = self._packed
        if packed.numel() < size:
            packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._packed = [other, packed]
        return torch.cat(pieces, out=packed[:size])

    def checksums(self) -> dict[str, int]:
        """Return the CRC-32 of the items taken since the last call."""
        fresh = {
            self._items[index].name: checksum(tensor)
            for index, tensor in self._held.items()
            if index >= self._num_summed
        }
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
        self._held[self._num_taken] = cast
        self._num_taken += 1
        return True


class Incoming:
    """One rank's items while their bytes arrive. Invariant: gives each to the assembly once, in order."""

    def __init__(
        self, items: Sequence[Item], assembly: Assembly, device: torch.device, kept: torch.Tensor | None = None
    ) -> None:
        """`kept` (uint8 [bytes of all items]): where the stream stands side by side; the assembly gets copies then."""
        self._items = items
        self._assembly = assembly
        self._device = device
        self._kept = kept
        self._starts = [0]
        for item in items:
            self._starts.append(self._starts[-1] + item.num_bytes)
        self._flat: dict[int, torch.Tensor] = {}
        self._num_given = 0

    def buffer(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return the memory [sum of sizes] for these parts; what is given on will be views of it."""
        first, size = parts[0], sum(part.size for part in parts)
        if self._kept is not None:
            at = self._starts[first.item] + first.start
            return self._kept[at : at + size]
        if len(parts) == 1:
            if first.item not in self._flat:
                self._flat[first.item] = self._memory(self._items[first.item])
            return self._flat[first.item][first.start : first.stop]
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        for part, piece in zip(parts, buffer.split([part.size for part in parts]), strict=True):
            self._flat[part.item] = piece
        return buffer

    def take(self, parts: Sequence[Part]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor) for each that is whole now that these parts are there."""
        last = parts[-1]
        end = last.item + (last.stop == self._items[last.item].num_bytes)
        for index in range(self._num_given, end):
            self._num_given += 1
            item = self._items[index]
            if item.num_bytes:
                yield from self._assembly.add(item, self._values(index), keep=self._kept is None)

    def _memory(self, item: Item) -> torch.Tensor:
        """Return bytes for an item that has buckets of its own: its place in the tensor, if that is in one piece."""
        place = self._assembly.place(item)
        if place.is_contiguous():
            return as_bytes(place)
        return torch.empty(item.num_bytes, dtype=torch.uint8, device=self._device)

    def _values(self, index: int) -> torch.Tensor:
        spec: TensorSpec = self._items[index].spec
        start, stop = self._starts[index : index + 2]
        flat = self._flat.pop(index) if self._kept is None else self._kept[start:stop]
        if flat.storage_offset() % torch_dtype(spec.dtype).itemsize:  # mixed dtypes side by side
            flat = flat.clone()
        return flat.view(torch_dtype(spec.dtype)).view(spec.shape)
