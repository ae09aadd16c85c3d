"""Export: a Hugging Face folder written by all ranks together; no rank ever holds more than its share and one piece.

A rank writes whole files and alone, so nothing is asked of the file system but that all ranks see one folder. Pieces
travel to the rank that writes their file as they are, in the dtype of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal.contracts.durable import sync
from areal.contracts.transfer import Piece, TensorSpec
from areal_fsdp2.shards import Shards

MAX_FILE_BYTES = 4 * 2**30
"""A file ends before the tensor that would make it larger."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of dtypes in a safetensors header."""
ALIGNMENT = 8
"""Bytes of which a safetensors header is a multiple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One safetensors file. Invariant: each tensor is in one file."""

    name: str
    tensors: tuple[int, ...]
    """Indices into `Layout.tensors`, in the order of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Weights to be written. Invariant: later updates do not change them."""

    tensors: tuple[TensorSpec, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """For each rank what it holds; together each tensor exactly once."""
    own: tuple[Tensor, ...]
    """This rank's pieces in the host's memory, in the order of `pieces`."""


def stage(shards: Shards) -> Staged:
    """Copy this rank's pieces in the dtype in which they are published; all ranks call it."""
    own: list[Tensor] = []
    for piece, (_, tensor) in zip(shards.pieces[dist.get_rank()], shards.own(), strict=True):
        own.append(torch.empty(piece.shape, dtype=_dtype(shards.tensors[piece.tensor])).copy_(tensor))
    return Staged(tensors=shards.tensors, pieces=shards.pieces, own=tuple(own))


def files_of(tensors: Sequence[TensorSpec], stem: str, max_bytes: int) -> list[File]:
    """Return the files of some tensors, in their order: ``stem.safetensors``, or several numbered ones."""
    groups: list[list[int]] = [[]]
    size = 0
    for index, spec in enumerate(tensors):
        if groups[-1] and size + num_bytes(spec) > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += num_bytes(spec)
    if len(groups) == 1:
        return [File(name=f"{stem}.safetensors", tensors=tuple(groups[0]))]
    return [
        File(name=f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def write(staged: Staged, folder: Path, stem: str, group: dist.ProcessGroup, max_bytes: int) -> None:
    """Write the files of all tensors into a folder that is there; all ranks call it, with a gloo group of all.

    Raises OSError of this rank's own files, after it has done its part for the others'.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    files = files_of(staged.tensors, stem, max_bytes)
    writer = {index: number % world for number, file in enumerate(files) for index in file.tensors}
    sent = [
        dist.isend(_bytes(tensor), writer[piece.tensor], group=group, tag=tag)
        for (tag, piece), tensor in zip(_tagged(staged, rank), staged.own, strict=True)
        if writer[piece.tensor] != rank
    ]
    problem: OSError | None = None
    for file in files[rank::world]:
        arriving = _arriving(staged, file, group)
        try:
            _write_file(folder / file.name, staged.tensors, file.tensors, arriving)
        except OSError as error:
            problem = problem or error
        for _ in arriving:  # senders wait until theirs has been taken
            pass
    if rank == 0 and len(files) > 1:
        try:
            _write_index(folder / f"{stem}.safetensors.index.json", files, staged.tensors)
        except OSError as error:
            problem = problem or error
    for work in sent:
        if work is not None:
            work.wait()
    if problem is not None:
        raise problem


def describe(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype, folder: Path
) -> None:
    """Write what a Hugging Face folder has beside weights, whose dtype is `dtype`."""
    config = module.config
    held, config.dtype = config.dtype, dtype
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    config.dtype = held
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * _dtype(spec).itemsize


def _dtype(spec: TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)


def _tagged(staged: Staged, rank: int) -> Iterator[tuple[int, Piece]]:
    """Yield a rank's pieces, each with a number of its own among all ranks'."""
    first = sum(len(pieces) for pieces in staged.pieces[:rank])
    yield from enumerate(staged.pieces[rank], first)


def _arriving(staged: Staged, file: File, group: dist.ProcessGroup) -> Iterator[tuple[Piece, Tensor]]:
    """Yield all pieces of a file, from whichever rank they come, one at a time."""
    own_rank = dist.get_rank()
    wanted = set(file.tensors)
    for rank in range(len(staged.pieces)):
        for number, (tag, piece) in enumerate(_tagged(staged, rank)):
            if piece.tensor not in wanted:
                continue
            if rank == own_rank:
                yield piece, staged.own[number]
                continue
            tensor = torch.empty(piece.shape, dtype=_dtype(staged.tensors[piece.tensor]))
            dist.recv(_bytes(tensor), rank, group=group, tag=tag)
            yield piece, tensor


def _write_file(
    path: Path, tensors: Sequence[TensorSpec], indices: Sequence[int], pieces: Iterator[tuple[Piece, Tensor]]
) -> None:
    """Write one file, whose pieces come in any order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[int, int] = {}
    size = 0
    for index in indices:
        spec = tensors[index]
        starts[index], size = size, size + num_bytes(spec)
        offsets = [starts[index], size]
        header[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        file.truncate(first + size)
        for piece, tensor in pieces:
            _write_piece(file, first + starts[piece.tensor], tensors[piece.tensor].shape, piece, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_piece(file: BinaryIO, first: int, shape: tuple[int, ...], piece: Piece, tensor: Tensor) -> None:
    """Write a box of a tensor of some shape that begins at byte `first`: one write for each run without a gap."""
    data: Any = _bytes(tensor).numpy()
    # Behind the last dimension that is not taken whole all is contiguous.
    axis = max((a for a, size in enumerate(piece.shape) if size != shape[a]), default=0)
    run = prod(piece.shape[axis:]) * tensor.element_size()
    strides = [prod(shape[a + 1 :]) * tensor.element_size() for a in range(len(shape))]
    inner = sum(strides[a] * piece.start[a] for a in range(axis, len(shape)))
    ranges = [range(piece.start[a], piece.start[a] + piece.shape[a]) for a in range(axis)]
    for number, outer in enumerate(product(*ranges)):
        file.seek(first + inner + sum(i * stride for i, stride in zip(outer, strides, strict=False)))
        file.write(data[number * run : (number + 1) * run])


def _write_index(path: Path, files: Sequence[File], tensors: Sequence[TensorSpec]) -> None:
    index = {
        "metadata": {"total_size": sum(num_bytes(spec) for spec in tensors)},
        "weight_map": {tensors[i].name: file.name for file in files for i in file.tensors},
    }
    path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    sync(path)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor ([bytes] uint8)."""
    return tensor.reshape(-1).view(torch.uint8)
