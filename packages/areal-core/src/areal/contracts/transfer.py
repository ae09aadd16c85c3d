"""The words of a weight update: layouts, plans, transfers and receipts, and the checksum both sides use."""

from __future__ import annotations

import ctypes
import platform
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from areal import env
from areal.contracts.component import Component
from areal.contracts.messages import Version

if TYPE_CHECKING:
    from torch import Tensor

Phase = Literal["stage", "commit", "rollback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Invariant: describes the whole tensor under its HF name, whatever shard a rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A torch dtype's name without the prefix, for example ``bfloat16``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of one tensor. Invariant: lies inside the whole tensor."""

    tensor: int
    """Index into `Layout.tensors`."""
    start: tuple[int, ...]
    """First index along each dimension."""
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """What to index the whole tensor with."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter (Hu et al. 2021): W + (alpha / rank) B A. Invariant: the weights beneath it never change."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Last parts of the names of the adapted modules, for example ``q_proj``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one side holds the weights. Invariant: two layouts with equal `host` can share memory."""

    host: str
    """Identity of the machine and its shared memory."""
    address: str = field(default_factory=env.node_address)
    """Where the other side can reach this one."""
    collective: str = "gloo"
    """Backend of torch.distributed that this side can use: gloo, nccl or hccl."""
    num_ranks: int = 1
    tensor_parallel: int = 1
    dtype: str = "float32"
    """What this side stores; the sender casts to the receiver's."""
    tensors: tuple[TensorSpec, ...] = ()
    """All parameters in the order in which they are sent; tied parameters stand once. Empty for receivers."""
    pieces: tuple[tuple[Piece, ...], ...] = ()
    """For each rank of a sender the boxes that it sends, in the order of `tensors`; all ranks' boxes together cover
    each tensor exactly once. Empty: rank 0 sends every tensor whole."""
    adapter: Adapter | None = None
    """What a sender that trains LoRA publishes: `tensors` are the adapter's, under PEFT's names, and no others."""
    max_adapter_rank: int = 0
    """A receiver's: largest `Adapter.rank` that it can serve; 0: it takes whole weights only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How weights go from one source to the receivers. Invariant: `uid` changes when any member changes."""

    uid: str
    source: Layout
    targets: tuple[Layout, ...]
    """One layout per engine, in the order of receiver indices."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The resharder's own: rendezvous address, folder, bucket size, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One phase of one update for one member. Invariant: a version is committed only after it was verified."""

    phase: Phase
    version: Version
    resharder: Component
    options: Any
    """The resharder's validated options."""
    plan: Plan
    member: int = 0
    """Index into ``plan.targets`` for an engine; 0 for the sender."""
    deadline_s: float = 300.0
    """Seconds this phase may take before it raises TransferFailed."""
    overlaps: bool = True
    """Whether the trainer is to go on before all is sent, where its backend can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one side saw. Invariant: sender and receivers agree on every checksum, or nothing is committed."""

    version: Version
    checksums: Mapping[str, int]
    """CRC-32 of the bytes of each piece of the plan's source in the receiver's dtype, by `piece_name`; a sender's are
    those of its own rank. Empty for commit and rollback."""
    num_bytes: int = 0
    """A sender's: what its rank put on the road for each receiver, less than its pieces when they were compressed; an
    engine's: what it staged."""
    seconds: float = 0.0


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes ([*], any dtype, any device), in row-major order."""
    data = tensor.detach().cpu().contiguous()
    size = data.numel() * data.element_size()
    if size == 0:
        return 0
    return zlib.crc32((ctypes.c_char * size).from_address(data.data_ptr()))


def piece_name(spec: TensorSpec, piece: Piece) -> str:
    """Return the HF name, and for a part of the tensor its box behind it: ``model.norm.weight[0:32]``."""
    if piece.shape == spec.shape:
        return spec.name
    return f"{spec.name}[{','.join(f'{box.start}:{box.stop}' for box in piece.box)}]"


def pieces_of(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Return what a rank of a sender sends; of a layout without pieces rank 0 sends everything whole."""
    if layout.pieces:
        return layout.pieces[rank]
    if rank:
        return ()
    return tuple(
        Piece(tensor=index, start=(0,) * len(spec.shape), shape=spec.shape) for index, spec in enumerate(layout.tensors)
    )


def local_address() -> str:
    """Return `Layout.address` of this process."""
    return env.node_address()


def local_host() -> str:
    """Return `Layout.host` of this process: the machine's name and the identity of its shared memory.

    Two containers of one machine may have a ``/dev/shm`` each; its device number tells them apart.
    """
    shared_memory = Path("/dev/shm")
    return f"{platform.node()}/{shared_memory.stat().st_dev if shared_memory.is_dir() else 'none'}"
