"""Which boxes travel from which trainer rank, and whole tensors put together from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from areal.builtins.resharders.wire import num_bytes, torch_dtype, wire_specs
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec, piece_name, pieces_of
from areal.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Item:
    """A piece on its way. Invariant: `spec` is what its sender gives, in the dtype that travels."""

    name: str
    """As `piece_name` says: the key of its checksum."""
    piece: Piece
    spec: TensorSpec
    """The tensor's HF name with the piece's shape."""

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.spec)


def items_of(plan: Plan, rank: int) -> tuple[Item, ...]:
    """Return what a trainer rank sends, in order."""
    wholes = wire_specs(plan)
    return tuple(
        Item(
            name=piece_name(wholes[piece.tensor], piece),
            piece=piece,
            spec=replace(wholes[piece.tensor], shape=piece.shape),
        )
        for piece in pieces_of(plan.source, rank)
    )


def sending_ranks(layout: Layout) -> list[int]:
    """Return the ranks that have pieces, in order; the first of them leads the others."""
    return [rank for rank in range(max(1, len(layout.pieces))) if pieces_of(layout, rank)] or [0]


def check_pieces(layout: Layout) -> None:
    """Raise TransferFailed when the ranks' boxes are not inside the tensors, in order, covering each exactly once."""
    boxes: dict[int, list[Piece]] = {index: [] for index in range(len(layout.tensors))}
    for rank, pieces in enumerate(layout.pieces):
        order = [piece.tensor for piece in pieces]
        if order != sorted(order) or any(tensor not in boxes for tensor in order):
            raise TransferFailed(f"the pieces of trainer rank {rank} are not in the order of its layout's tensors")
        for piece in pieces:
            boxes[piece.tensor].append(piece)
    for index, spec in enumerate(layout.tensors):
        if layout.pieces and not _cover(spec, boxes[index]):
            raise TransferFailed(f"the trainer ranks' pieces of {spec.name!r} do not cover it exactly once")


def _cover(spec: TensorSpec, pieces: list[Piece]) -> bool:
    if any(len(piece.start) != len(spec.shape) or len(piece.shape) != len(spec.shape) for piece in pieces):
        return False
    if sum(prod(piece.shape) for piece in pieces) != prod(spec.shape):
        return False
    starts = torch.tensor([piece.start for piece in pieces], dtype=torch.int64).reshape(len(pieces), -1)
    stops = starts + torch.tensor([piece.shape for piece in pieces], dtype=torch.int64).reshape(len(pieces), -1)
    if bool((starts < 0).any() or (stops > torch.tensor(spec.shape)).any()):
        return False
    highest, lowest = torch.maximum(starts[:, None], starts[None]), torch.minimum(stops[:, None], stops[None])
    meet = (highest < lowest).all(dim=-1)
    return int(meet.sum()) == int(meet.diagonal().sum())


class Assembly:
    """Tensors whose pieces arrive in any order. Invariant: yields each tensor of the plan once, when it is whole."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._specs = wire_specs(plan)
        self._device = device
        self._wholes: dict[int, torch.Tensor] = {}
        self._missing = [prod(spec.shape) for spec in self._specs]
        self._empty = deque(index for index, missing in enumerate(self._missing) if not missing)

    def place(self, item: Item) -> torch.Tensor:
        """Return the memory of the item's box in its tensor, [*item.spec.shape]."""
        index = item.piece.tensor
        if index not in self._wholes:
            spec = self._specs[index]
            self._wholes[index] = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
        return self._wholes[index][item.piece.box]

    def add(self, item: Item, values: torch.Tensor, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Take an item's values and yield (HF name, tensor) if that makes one whole.

        `keep`: their memory is nobody else's, so a whole tensor needs no copy.
        """
        index, spec = item.piece.tensor, self._specs[item.piece.tensor]
        if not prod(item.spec.shape):
            return
        if keep and item.spec.shape == spec.shape:
            self._wholes[index] = values
        elif values.data_ptr() != (place := self.place(item)).data_ptr():
            place.copy_(values)
        self._missing[index] -= prod(item.spec.shape)
        if not self._missing[index]:
            yield from self._empty_before(index)
            yield spec.name, self._wholes.pop(index)

    def rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors without elements, which need no pieces, that have not had their turn."""
        yield from self._empty_before(len(self._specs))

    def _empty_before(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        while self._empty and self._empty[0] < index:
            spec = self._specs[self._empty.popleft()]
            yield spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
