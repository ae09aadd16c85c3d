"""Trainer rank and engine of weight_sync.py, each in a process of its own that is told what to do.

All times are read from the machine's monotonic clock, so those of two processes can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from areal.contracts.resharder import Lasting
from areal.contracts.transfer import Plan, checksum, piece_name, pieces_of
from measuring.sync_models import SIZES, rows_of

DEADLINE_S = 600.0
POLL_S = 0.001
BLOCK_BYTES = 2**29
SPREAD = 0.02
"""Deviation of the weights: what transformers initialises them with."""


Spent = tuple[float, float]
"""When it was done (seconds on the machine's monotonic clock), and this process's processor seconds."""


class Rank:
    """A trainer rank with float32 master shards. Invariant: between two `change` the weights are one version."""

    def __init__(self, rank: int, num_ranks: int, size: str, rendezvous: str) -> None:
        torch.set_num_threads(1)
        self._rank, self._num_ranks = rank, num_ranks
        self._specs = SIZES[size].specs()
        dist.init_process_group("gloo", init_method=f"tcp://{rendezvous}", rank=rank, world_size=num_ranks)
        self._mesh = init_device_mesh("cpu", (num_ranks,))
        generator = torch.Generator().manual_seed(rank)
        self._masters: dict[str, torch.Tensor] = {}
        for spec in self._specs:
            rows = rows_of(spec, rank, num_ranks)[1]
            self._masters[spec.name] = torch.randn(rows, *spec.shape[1:], generator=generator).mul_(SPREAD)
        self._sender: Any = None

    def change(self, share: float, seed: int) -> None:
        """Make other weights: of each shard that share of the numbers, at random places, by 2 %; nobody measures it.

        A bfloat16 has steps of at most 0.8 %, so each of those words changes.
        """
        generator = torch.Generator().manual_seed(self._num_ranks * seed + self._rank)
        for master in self._masters.values():
            flat = master.view(-1)
            count = round(share * flat.numel())
            places = torch.randint(flat.numel(), (count,), generator=generator).unique()
            flat[places] = flat[places] * 1.02

    def open(self, resharder: Any, plan: Plan) -> None:
        self._sender = resharder.sender(plan, self._rank)

    def send(self, version: int) -> tuple[Spent, dict[str, int], int]:
        """Return when this rank was free again, and its receipt's checksums and bytes."""
        began = time.process_time()
        receipt = self._sender.send(version, self._masters.items(), DEADLINE_S)
        return _spent(began), dict(receipt.checksums), receipt.num_bytes

    def close(self) -> None:
        self._sender.close()
        self._sender = None

    def save_gathered(self, path: str) -> Spent:
        """Without AReaL: gather each parameter whole as FSDP2 does, save a file on rank 0; return when it was there."""
        began = time.process_time()
        tensors: dict[str, torch.Tensor] = {}
        for spec in self._specs:
            local = self._masters[spec.name]
            stride = torch.empty(spec.shape, device="meta").stride()
            sharded = DTensor.from_local(local, self._mesh, [Shard(0)], shape=torch.Size(spec.shape), stride=stride)
            whole = sharded.full_tensor()
            if self._rank == 0:
                tensors[spec.name] = whole.bfloat16()
        if self._rank == 0:
            _save(tensors, Path(path))
        return _spent(began)

    def save_own(self, path: str) -> Spent:
        """Without AReaL: each rank saves a file of its own shards; return when it was there."""
        began = time.process_time()
        tensors = {name: master.bfloat16() for name, master in self._masters.items()}
        _save(tensors, Path(f"{path}-{self._rank}"))
        return _spent(began)

    def checksums(self, plan: Plan) -> dict[str, int]:
        """Return the CRC-32 of this rank's pieces in bfloat16."""
        return {
            piece_name(self._specs[piece.tensor], piece): checksum(master.bfloat16())
            for piece, master in zip(pieces_of(plan.source, self._rank), self._masters.values(), strict=True)
        }


class Engine:
    """The receiving end: bfloat16 parameters. Invariant: an update ends when all of them are new.

    They are copied into warm memory, as by an engine that packs them, or adopted, as by the engine ``transformers``.
    """

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        self._specs = {spec.name: spec for spec in SIZES[size].specs()}
        self._parameters = {name: torch.ones(spec.shape, dtype=torch.bfloat16) for name, spec in self._specs.items()}
        self._adopted: dict[str, torch.Tensor] = {}
        self._receiver: Any = None

    def open(self, resharder: Any, plan: Plan) -> None:
        self._receiver = resharder.receiver(plan, 0)

    def receive(self, version: int, adopts: bool) -> Spent:
        """Copy what arrives into the parameters, or adopt it; return when the last one was new."""
        began = time.process_time()
        arriving = self._receiver.receive(version, DEADLINE_S)
        if adopts:
            assert isinstance(self._receiver, Lasting)
            self._adopted = dict(arriving)
        else:
            for name, tensor in arriving:
                self._parameters[name].copy_(tensor)
        return _spent(began)

    def close(self) -> None:
        self._receiver.close()
        self._receiver = None
        self._adopted = {}

    def load_gathered(self, path: str) -> Spent:
        """Wait for the file of `Rank.save_gathered`, load it and copy it into the parameters."""
        began = time.process_time()
        for name, tensor in load_file(_awaited(Path(path))).items():
            self._parameters[name].copy_(tensor)
        return _spent(began)

    def load_own(self, path: str, num_ranks: int) -> Spent:
        """Wait for the files of `Rank.save_own`, load each and copy its rows into the parameters."""
        began = time.process_time()
        for rank in range(num_ranks):
            for name, tensor in load_file(_awaited(Path(f"{path}-{rank}"))).items():
                first, count = rows_of(self._specs[name], rank, num_ranks)
                self._parameters[name][first : first + count].copy_(tensor)
        return _spent(began)

    def checksums(self, plan: Plan) -> tuple[dict[str, int], float]:
        """Return the CRC-32 of each piece as the parameters have it, and the seconds that took."""
        began = time.perf_counter()
        parameters = self._adopted or self._parameters
        found: dict[str, int] = {}
        for rank in range(plan.source.num_ranks):
            for piece in pieces_of(plan.source, rank):
                spec = plan.source.tensors[piece.tensor]
                found[piece_name(spec, piece)] = checksum(parameters[spec.name][piece.box])
        return found, time.perf_counter() - began

    def memcpy(self, repeats: int) -> list[tuple[float, float]]:
        """Return seconds and processor seconds of copying as many bytes as the parameters have, by one thread.

        From warm memory to warm memory, in blocks too large for a cache, so that no second model is needed.
        """
        num_bytes = sum(2 * parameter.numel() for parameter in self._parameters.values())
        source, target = (torch.ones(min(num_bytes, BLOCK_BYTES), dtype=torch.uint8) for _ in range(2))
        found: list[tuple[float, float]] = []
        for _ in range(repeats):
            began, began_cpu = time.perf_counter(), time.process_time()
            for at in range(0, num_bytes, BLOCK_BYTES):
                size = min(BLOCK_BYTES, num_bytes - at)
                target[:size].copy_(source[:size])
            found.append((time.perf_counter() - began, time.process_time() - began_cpu))
        return found


def _spent(began: float) -> Spent:
    return time.perf_counter(), time.process_time() - began


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    draft = path.with_suffix(".draft")
    save_file(dict(tensors), draft)
    _sync(draft)
    draft.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _awaited(path: Path) -> Path:
    for _ in _polls():
        if path.exists():
            return path
    raise TimeoutError(f"{path} did not appear within {DEADLINE_S:g} s")


def _polls() -> Iterator[None]:
    end = time.perf_counter() + DEADLINE_S
    while time.perf_counter() < end:
        yield
        time.sleep(POLL_S)
