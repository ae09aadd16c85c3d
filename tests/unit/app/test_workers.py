"""What the workers are given: devices, threads, resources, an interpreter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from areal.app.resolve import resolve
from areal.app.workers import Workers, announce_engine_process
from areal.builtins.accelerators.cpu import CpuAccelerator
from areal.config import RunConfig
from areal.contracts.accelerator import Accelerator
from areal.contracts.cluster import Cluster, Handle, Room, WorkerSpec
from areal.contracts.specs import BackendContext, EngineContext
from areal.monitor.folder import RunFolder
from areal.plugins import discover

CORES = 24


class Recorder:
    """A cluster that starts nothing. Invariant: `specs` is everything that it was asked for, in order."""

    def __init__(self) -> None:
        self.specs: list[WorkerSpec] = []

    async def spawn(self, spec: WorkerSpec) -> Handle:
        self.specs.append(spec)
        return cast(Handle, None)


async def spawned(tmp_path: Path, recipe: dict[str, Any]) -> dict[str, WorkerSpec]:
    config = RunConfig.model_validate({"device": "cpu", **recipe})
    resolved, recorder = resolve(config, discover()), Recorder()
    workers = Workers(resolved, config.model, cast(Cluster, recorder), RunFolder(tmp_path), ())
    workers.model_is_there.set()
    await workers.trainer("trainer-0", 0)
    await workers.engine("engine-0")
    await workers.rollout("rollout-0")
    return {spec.kind: spec for spec in recorder.specs}


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))


@pytest.mark.parametrize(
    ("infer", "replicas", "devices", "parallel", "threads"),
    [
        ({}, 1, 1, "dp", CORES // 2),
        ({}, 3, 1, "dp", CORES // 4),
        ({"num_gpus": 2, "parallel": "tp"}, 1, 2, "tp", CORES // 3),
        ({"num_gpus": 4, "parallel": "tp"}, 2, 2, "tp", CORES // 5),
        ({"num_nodes": 2, "gpus_per_node": 2, "parallel": "pp"}, 1, 4, "pp", CORES // 5),
        ({"num_gpus": 2}, 2, 1, "dp", CORES // 3),
    ],
)
async def test_devices_and_cores_of_an_engine(
    tmp_path: Path, infer: dict[str, Any], replicas: int, devices: int, parallel: str, threads: int
) -> None:
    recipe = {"resources": {"infer": infer}, "engine": {"replicas": replicas}}
    specs = await spawned(tmp_path, recipe)
    (context,) = [arg for arg in specs["engine"].args if isinstance(arg, EngineContext)]
    assert (context.devices, context.parallel) == (devices, parallel)
    assert {kind: spec.environment["OMP_NUM_THREADS"] for kind, spec in specs.items()} == {
        "trainer": str(threads),
        "engine": str(threads),
        "rollout": "1",
    }
    assert specs["engine"].resources == {"infer": devices}, "the CPU is shared"


class Holder(Recorder):
    """A cluster that can be full. Invariant: `rooms` is what it was asked to hold."""

    async def reserve(self, rooms: Sequence[Room]) -> Mapping[str, int]:
        self.rooms = list(rooms)
        return {}


async def test_room_for_everybody_is_reserved(tmp_path: Path) -> None:
    groups = {"train": {"num_nodes": 1, "gpus_per_node": 1}, "infer": {"num_nodes": 2, "gpus_per_node": 4}}
    config = RunConfig.model_validate({"device": "cpu", "resources": groups, "engine": {"replicas": 4}})
    holder, resolved = Holder(), resolve(config, discover())
    await Workers(resolved, config.model, cast(Cluster, holder), RunFolder(tmp_path), ()).reserve()
    assert holder.rooms == [
        Room(kind="trainer", resources={"train": 1.0}, count=1, least=1),
        Room(kind="engine", resources={"infer": 2.0}, count=4, least=1),
    ]
    await Workers(resolved, config.model, cast(Cluster, Recorder()), RunFolder(tmp_path), ()).reserve()


async def test_each_rank_of_the_trainer_has_a_device_a_place_and_its_share_of_the_cores(tmp_path: Path) -> None:
    groups = {"train": {"num_nodes": 2, "gpus_per_node": 2}, "infer": {"num_gpus": 2}}
    config = RunConfig.model_validate({"device": "cpu", "resources": groups, "engine": {"replicas": 2}})
    one = RunConfig.model_validate({"device": "cpu"})
    resolved = replace(resolve(one, discover()), config=config, accelerator=cast(Accelerator, Gpu()))
    holder = Holder()
    workers = Workers(resolved, config.model, cast(Cluster, holder), RunFolder(tmp_path), ())
    await workers.reserve()
    device = {"train": 1.0, "GPU": 1.0}
    room = Room(kind="trainer", resources=device, count=4, least=4, together=2, apart=True)
    assert holder.rooms[0] == room and room.whole == {"train": 2.0, "GPU": 2.0}
    assert workers.num_ranks == 4
    for rank in range(4):
        await workers.trainer(f"trainer-0.{rank}", rank)
    contexts = [arg for spec in holder.specs for arg in spec.args if isinstance(arg, BackendContext)]
    assert [context.rank for context in contexts] == [spec.place for spec in holder.specs] == [0, 1, 2, 3]
    assert all(replace(context, rank=0) == contexts[0] for context in contexts)
    assert (contexts[0].world_size, contexts[0].devices.per_node, contexts[0].rendezvous) == (4, 2, "")
    assert all(spec.resources == device for spec in holder.specs)
    assert {spec.environment["OMP_NUM_THREADS"] for spec in holder.specs} == {str(CORES // 6)}


async def test_on_a_shared_device_each_has_half_of_it_in_one_place_and_all_cores(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"device": "cpu", "resources": {"shared": True}})
    resolved = replace(resolve(config, discover()), accelerator=cast(Accelerator, Gpu()))
    holder = Holder()
    workers = Workers(resolved, config.model, cast(Cluster, holder), RunFolder(tmp_path), ())
    await workers.reserve()
    trainer, engine = {"train": 1.0, "GPU": 0.5}, {"infer": 1.0, "GPU": 0.5}
    (room,) = holder.rooms
    assert room == Room(kind="trainer", resources=trainer, count=1, least=1, beside={"engine": engine})
    assert room.whole == {"train": 1.0, "infer": 1.0, "GPU": 1.0}
    workers.model_is_there.set()
    await workers.trainer("trainer-0", 0)
    await workers.engine("engine-0")
    assert [spec.resources for spec in holder.specs] == [trainer, engine]
    assert {spec.environment["OMP_NUM_THREADS"] for spec in holder.specs} == {str(CORES)}


class Gpu(CpuAccelerator):
    """The CPU under the resource of another device. Invariant: asks for no device."""

    resource = "GPU"


async def test_only_engines_run_in_another_interpreter(tmp_path: Path, other_python: Path) -> None:
    specs = await spawned(tmp_path, {"engine": {"python": str(other_python)}})
    assert {kind: spec.python for kind, spec in specs.items()} == {
        "trainer": "",
        "engine": str(other_python),
        "rollout": "",
    }


def test_a_plugin_that_is_blocked_here_need_not_be_installed_there() -> None:
    announce_engine_process("transformers", ("installed-at-the-controller",))
