"""The trainer's process group: ranks that do not come, and a process that is a rank already."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from areal.contracts.specs import BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal.errors import WorkerFailed
from areal.testing.engine_fixtures import HostCpu
from areal.testing.ranks import free_rendezvous
from areal_fsdp2 import mesh
from areal_fsdp2.dimensions import Dimensions
from areal_fsdp2.mesh import Mesh, leave

ALONE = BackendContext(model=ModelSpec(), training=TrainingSpec(), accelerator=HostCpu(), seed=0)


def of_two(rank: int, rendezvous: str) -> BackendContext:
    return replace(ALONE, rank=rank, devices=TrainerDevices(world_size=2, per_node=2), rendezvous=rendezvous)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "JOIN_S", 1.0)
    rendezvous = free_rendezvous()
    with pytest.raises(WorkerFailed, match=f"rank {rank} of 2 did not meet the other trainer ranks at '{rendezvous}'"):
        Mesh(of_two(rank, rendezvous), Dimensions(shard=2))
    assert not dist.is_initialized()


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(WorkerFailed, match="2 trainer ranks need a rendezvous host:port, not ''"):
        Mesh(of_two(0, ""), Dimensions(shard=2))


def test_a_process_is_one_rank() -> None:
    try:
        first = Mesh(ALONE, Dimensions())
        assert Mesh(ALONE, Dimensions()).weights is first.weights
        assert first.from_speakers("all") == ["all"]
        with pytest.raises(WorkerFailed, match="rank 0 of 1 already and cannot be rank 0 of 2"):
            Mesh(of_two(0, free_rendezvous()), Dimensions(shard=2))
    finally:
        leave()
    assert not dist.is_initialized()
