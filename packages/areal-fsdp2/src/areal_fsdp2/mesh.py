"""The process group of the trainer's ranks and the mesh over it; every backend of one process shares them."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from areal.contracts.specs import BackendContext
from areal.errors import WorkerFailed, first_line
from areal_fsdp2.dimensions import NAMES, Dimensions

JOIN_S = 180.0
"""Within this time all ranks of a trainer must have come to its rendezvous."""
FSDP = "fsdp"
"""The flat dimension over which weights are sharded: data ranks that share a copy, and the parts of their sequences."""


class Mesh:
    """Where this rank stands. Invariant: all ranks make their meshes in the same order, with the same dimensions."""

    def __init__(self, context: BackendContext, dimensions: Dimensions) -> None:
        """Meet the other ranks; WorkerFailed in one sentence when they do not come."""
        self.dimensions = dimensions
        self.rank = context.rank
        self.device = _device(context)
        self.place = dimensions.place(context.rank)
        self.data_rank = dimensions.data_rank(context.rank)
        _join(context, self.device)
        self.weights, self.work = _meshes(self.device.type, dimensions)

    @property
    def tp(self) -> DeviceMesh:
        return self.weights["tp"]

    @property
    def fsdp(self) -> DeviceMesh:
        """One dimension to shard over, or two: copies, and to shard over."""
        if self.dimensions.replicate > 1:
            return self.weights["replicate", FSDP]
        return self.weights[FSDP]

    @property
    def experts(self) -> DeviceMesh:
        """Who shares the experts of a layer out, in two dimensions: ``ep`` and ``tp``. All ranks must ask for it."""
        return _expert_mesh(self.device.type, self.dimensions)["ep", "tp"]

    @property
    def beside_experts(self) -> DeviceMesh:
        """The ranks that hold the same experts: one dimension to shard over, or two, as `fsdp`."""
        mesh = _expert_mesh(self.device.type, self.dimensions)
        return mesh["replicate", FSDP] if self.dimensions.replicate > 1 else mesh[FSDP]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return this rank's process group along one of `NAMES`."""
        return self.work[name].get_group()

    def from_speakers(self, value: Any) -> list[Any]:
        """Return the values of those ranks that speak for their data rank, in its order; pickled, so for few bytes."""
        values: list[Any] = [None] * self.dimensions.world
        dist.all_gather_object(values, value)
        return [values[rank] for rank in self.dimensions.speakers()]


def leave() -> None:
    """Give the process group back, if there is one; the other ranks need not be there any more."""
    _MESHES.clear()
    _expert_mesh.cache_clear()
    # torch remembers the meshes of results by what they look like, and with them groups that are no more.
    _clear_sharding_prop_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


_MESHES: dict[tuple[str, Dimensions], tuple[DeviceMesh, DeviceMesh]] = {}


def _device(context: BackendContext) -> torch.device:
    """Return this rank's device and make it the current one; a rank may see its own device only."""
    kind = context.accelerator.name
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.get_device_module(kind).device_count()
    device = torch.device(kind, context.rank % context.devices.per_node % max(1, visible))
    torch.get_device_module(kind).set_device(device)
    return device


def _join(context: BackendContext, device: torch.device) -> None:
    if dist.is_initialized():
        if dist.get_world_size() != context.world_size or dist.get_rank() != context.rank:
            raise WorkerFailed(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and cannot be rank "
                f"{context.rank} of {context.world_size}; close the other backend first"
            )
        return
    collective = context.accelerator.collective
    backends = collective if device.type == "cpu" else f"cpu:gloo,{device.type}:{collective}"
    try:
        store = _store(context)
        dist.init_process_group(
            backends,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=context.training.step_timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise WorkerFailed(
            f"rank {context.rank} of {context.world_size} did not meet the other trainer ranks at "
            f"{context.rendezvous!r} within {JOIN_S:g} s ({first_line(error)})"
        ) from error


def _store(context: BackendContext) -> Store:
    if context.world_size == 1:
        return HashStore()
    host, _, port = context.rendezvous.rpartition(":")
    if not port.isdigit():
        raise WorkerFailed(
            f"{context.world_size} trainer ranks need a rendezvous host:port, not {context.rendezvous!r}"
        )
    return TCPStore(host, int(port), context.world_size, is_master=context.rank == 0, timeout=timedelta(seconds=JOIN_S))


@cache
def _expert_mesh(kind: str, dimensions: Dimensions) -> DeviceMesh:
    """Return a third view of the ranks: neighbours that differ along `FSDP` and ``tp`` share the experts out."""
    shard = dimensions.shard * dimensions.sp // dimensions.ep
    sizes = (dimensions.pp, dimensions.replicate, shard, dimensions.ep, dimensions.tp)
    return init_device_mesh(kind, sizes, mesh_dim_names=("pp", "replicate", FSDP, "ep", "tp"))


def _meshes(kind: str, dimensions: Dimensions) -> tuple[DeviceMesh, DeviceMesh]:
    """Return two views of the same ranks: how weights are spread (`FSDP` in it), and how work is (`NAMES`)."""
    if (kind, dimensions) not in _MESHES:
        flat = (dimensions.pp, dimensions.replicate, dimensions.shard * dimensions.sp, dimensions.tp)
        weights = init_device_mesh(kind, flat, mesh_dim_names=("pp", "replicate", FSDP, "tp"))
        work = weights._unflatten(FSDP, (dimensions.shard, dimensions.sp), ("shard", "sp"))
        assert work.mesh_dim_names == NAMES
        _MESHES[kind, dimensions] = (weights, work)
    return _MESHES[kind, dimensions]
