"""The ranks' parts of tensors as torch.distributed.checkpoint takes them: by their place in the whole tensor.

So any mesh can read what another has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from areal.errors import JournalError, WorkerFailed, first_line
from areal_fsdp2.shards import Part

Kinds = Mapping[str, Sequence[Part]]
"""Kinds of tensors (weights, exp_avg, ...) and what this rank holds of each."""


class Boxes:
    """What a rank holds of one tensor. Invariant: any two ranks' boxes are the same box or apart."""

    def __init__(self, part: Part) -> None:
        self._shape = torch.Size(part.shape)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self.add(part)

    def add(self, part: Part) -> None:
        self._views[part.start] = part.view

    def at(self, index: MetadataIndex) -> Tensor:
        """Return the box that begins at an index."""
        return self._views[tuple(index.offset or ())]

    def size(self) -> torch.Size:
        return self._shape

    def copy(self) -> None:
        """Take copies in the host's memory in place of the views."""
        for start, view in self._views.items():
            self._views[start] = torch.empty(view.shape, dtype=view.dtype).copy_(view)

    # What torch calls a _Checkpointable.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(start, view),
                    properties=TensorProperties.create_from_tensor(view),
                    size=self._shape,
                ),
            )
            for start, view in self._views.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(start, view) for start, view in self._views.items()]


def copied(kinds: Kinds) -> dict[str, Boxes]:
    """Return copies of all parts in the host's memory, by ``kind/name``."""
    boxes = _boxes(kinds)
    for box in boxes.values():
        box.copy()
    return boxes


def write(boxes: Mapping[str, Boxes], folder: Path, group: dist.ProcessGroup) -> None:
    """Write what was `copied`; all ranks call it, with a gloo group of all. JournalError on all when one cannot."""
    try:
        save(
            cast(dict[str, Any], boxes),
            storage_writer=FileSystemWriter(folder),
            planner=_SavePlanner(flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise JournalError(f"rank {rank} could not write its part of the checkpoint: {first_line(cause)}") from error


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a folder, by ``kind/name``; JournalError when they cannot be told."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
        found = metadata.state_dict_metadata
        return {key: tuple(entry.size) for key, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    except FileNotFoundError as error:
        raise JournalError(
            f"{str(folder)!r} has no .metadata; put the file back, or go on from an older checkpoint"
        ) from error
    except (MemoryError, OSError) as error:  # nothing is wrong with the file
        raise WorkerFailed(f"{str(folder)!r} cannot be read: {error or type(error).__name__}") from error
    except Exception as error:  # pickle raises whatever it meets
        raise JournalError(
            f"{str(folder / '.metadata')!r} is damaged ({first_line(error)}); go on from an older checkpoint"
        ) from error


def read(kinds: Kinds, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill all parts from a folder; all ranks call it. Raises JournalError on all when a file is missing or damaged."""
    try:
        load(
            cast(dict[str, Any], _boxes(kinds)),
            storage_reader=FileSystemReader(folder),
            planner=_LoadPlanner(flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        said = f"{first_line(cause) or type(cause).__name__}, says rank {rank}"
        if isinstance(cause, MemoryError | OSError) and not isinstance(cause, FileNotFoundError):
            raise WorkerFailed(f"{str(folder)!r} cannot be read: {said}") from error
        raise JournalError(f"{str(folder)!r} is damaged ({said}); go on from an older checkpoint") from error


class _SavePlanner(DefaultSavePlanner):
    """Invariant: a box is written as it was staged."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return cast(Boxes, self.state_dict[index.fqn]).at(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Invariant: what is read goes into the memory of the parts."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The original drops what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return cast(Boxes, self.state_dict[index.fqn]).at(index)


def _boxes(kinds: Kinds) -> dict[str, Boxes]:
    found: dict[str, Boxes] = {}
    for kind, parts in kinds.items():
        for part in parts:
            key = f"{kind}/{part.name}"
            if key in found:
                found[key].add(part)
            else:
                found[key] = Boxes(part)
    return found


def _chunk(start: tuple[int, ...], view: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(start), sizes=view.shape)
