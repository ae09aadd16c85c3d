"""Which part of each tensor of the checkpoint lies on which rank: the one map for loading, sending and saving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from areal.algorithms.update.regions import Box, Region, regions
from areal.contracts.transfer import Piece, TensorSpec
from areal.errors import WorkerFailed

ADAPTER_PREFIX = "base_model.model."
"""How PEFT's files begin the names of LoRA factors."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What this rank holds of a tensor. Invariant: `view` shares the parameter's memory."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    start: tuple[int, ...]
    view: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        """What to index the whole tensor with."""
        return tuple(slice(low, low + size) for low, size in zip(self.start, self.view.shape, strict=True))


class Shards:
    """Invariant: all ranks agree on `tensors` and `pieces`; the pieces cover each tensor exactly once."""

    def __init__(self, parts: Sequence[Part], dtype: str) -> None:
        """Tell the other ranks of the process group what this one holds, and hear what they do."""
        self.parts = tuple(parts)
        held = [(part.name, part.shape, part.start, tuple(part.view.shape)) for part in parts]
        everybody: list[list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]] = [
            [] for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(everybody, held)
        shapes = {name: shape for boxes in everybody for name, shape, _, _ in boxes}
        self.tensors = tuple(TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items())
        self._numbers = {name: number for number, name in enumerate(shapes)}
        # Copies of a box are as good as each other; the first rank's is taken.
        taken: set[Piece] = set()
        pieces: list[tuple[Piece, ...]] = []
        for boxes in everybody:
            own = {Piece(tensor=self._numbers[n], start=start, shape=shape) for n, _, start, shape in boxes} - taken
            taken |= own
            pieces.append(tuple(sorted(own, key=lambda piece: (piece.tensor, piece.start))))
        self.pieces = tuple(pieces)
        self._check(taken)
        self._views = {(self._numbers[part.name], part.start): part.view for part in parts}

    def own(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor) for each of this rank's `pieces`, in their order."""
        for piece in self.pieces[dist.get_rank()]:
            yield self.tensors[piece.tensor].name, self.view(piece)

    def view(self, piece: Piece) -> Tensor:
        """Return one of this rank's pieces."""
        return self._views[piece.tensor, piece.start]

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, whole tensor) on rank 0, one at a time; on other ranks send what it needs and yield nothing.

        All ranks must go through it to its end.
        """
        rank = dist.get_rank()
        owners: list[list[tuple[int, Piece]]] = [[] for _ in self.tensors]
        for owner, pieces in enumerate(self.pieces):
            for piece in pieces:
                owners[piece.tensor].append((owner, piece))
        for spec, boxes in zip(self.tensors, owners, strict=True):
            if rank == 0:
                yield spec.name, self._assembled(spec, boxes)
            else:
                for owner, piece in boxes:
                    if owner == rank:
                        dist.send(self.view(piece).contiguous(), 0)

    def _assembled(self, spec: TensorSpec, boxes: Sequence[tuple[int, Piece]]) -> Tensor:
        sample = self.parts[0].view
        whole = torch.empty(spec.shape, dtype=sample.dtype, device=sample.device)
        for owner, piece in boxes:
            if owner == 0:
                whole[piece.box] = self.view(piece)
            else:
                arrived = torch.empty(piece.shape, dtype=sample.dtype, device=sample.device)
                dist.recv(arrived, owner)
                whole[piece.box] = arrived
        return whole

    def _check(self, taken: set[Piece]) -> None:
        covered = [0] * len(self.tensors)
        for piece in taken:
            covered[piece.tensor] += prod(piece.shape)
        for spec, size in zip(self.tensors, covered, strict=True):
            if size != prod(spec.shape):
                raise WorkerFailed(
                    f"the ranks hold {size} of {prod(spec.shape)} numbers of {spec.name}; this mesh cannot spread it"
                )


def parts_of(module: nn.Module) -> list[Part]:
    """Return what this rank holds of each parameter of a Hugging Face module, tied ones once, empty parts left out."""
    return [part for name, parameter in module.named_parameters() for part in parts_of_parameter(name, parameter)]


def parts_of_parameter(name: str, parameter: Tensor) -> list[Part]:
    """Return what this rank holds of a parameter, or of a tensor that is placed as it is."""
    found = (part_of(region, parameter) for region in regions_of(name, tuple(parameter.shape)))
    return [part for part in found if part is not None]


def regions_of(name: str, shape: tuple[int, ...]) -> list[Region]:
    """Return the files' tensors that make up a parameter of a module that may have LoRA in it."""
    if ".lora_" in name:
        return regions(ADAPTER_PREFIX + name.replace(".default.", "."), shape)
    return regions(name.replace(".base_layer.", "."), shape)


def own_box(parameter: Tensor) -> Box:
    """Return where this rank's local part lies in the whole parameter."""
    box = tuple((0, size) for size in parameter.shape)
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        # Tensor parallelism cut first and is the last dimension; FSDP cut what was left.
        for axis in reversed(range(len(coordinate))):
            box = _cut(box, parameter.placements[axis], parameter.device_mesh, axis, coordinate[axis])
    return box


def _cut(box: Box, placement: Placement, mesh: DeviceMesh, axis: int, coordinate: int) -> Box:
    if placement.is_replicate():
        return box
    dim = placement.dim if isinstance(placement, Shard) else getattr(placement, "dim", None)
    if dim is None:
        raise WorkerFailed(f"a parameter is placed {placement}, which is no part of it")
    low, size = box[dim]
    share = -(-size // mesh.size(axis))
    first = min(coordinate * share, size)
    return (*box[:dim], (low + first, min(share, size - first)), *box[dim + 1 :])


def local(parameter: Tensor) -> Tensor:
    """Return the memory of a parameter on this rank."""
    return parameter._local_tensor.detach() if isinstance(parameter, DTensor) else parameter.detach()


def part_of(region: Region, parameter: Tensor) -> Part | None:
    """Return what this rank holds of a region of a parameter, or of its gradient; None for nothing."""
    start: list[int] = []
    within: list[slice] = []
    for (low, size), (own_low, own_size) in zip(region.box, own_box(parameter), strict=True):
        first, stop = max(low, own_low), min(low + size, own_low + own_size)
        if stop <= first:
            return None
        start.append(first - low)
        within.append(slice(first - own_low, stop - own_low))
    view = local(parameter)[tuple(within)]
    for axis in region.index:
        view = view.squeeze(axis)
    return Part(
        region.name, region.shape, tuple(low for axis, low in enumerate(start) if axis not in region.index), view
    )
