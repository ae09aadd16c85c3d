"""Two workers of different kinds in one bundle, on one device; Ray counts GPUs that it is told of and looks at none."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from ray_nodes import TOKEN, Nodes
from ray_site import Site

from areal.cluster.ray import RayCluster, RayHandle, RayOptions
from areal.contracts.cluster import Room, WorkerSpec
from areal.errors import WorkerFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARTS = {"trainer": {"train": 1.0, "GPU": 0.5}, "engine": {"infer": 1.0, "GPU": 0.5}}
ROOM = Room(kind="trainer", resources=PARTS["trainer"], count=1, least=1, beside={"engine": PARTS["engine"]})


def worker(name: str) -> WorkerSpec:
    kind = name.split("-")[0]
    return WorkerSpec(name=name, kind=kind, factory="cluster_workers:Mortal", resources=PARTS[kind])


async def place(handle: RayHandle) -> tuple[str, str]:
    """Return the node and the device that the worker sees."""
    return handle.process.node_id, await handle.call("environment", "CUDA_VISIBLE_DEVICES")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(ray_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayCluster]:
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        ray_nodes.head(num_gpus=2, train=1, infer=1)
        made = Site(RayCluster(RayOptions(address=ray_nodes.address, reserve_timeout_s=2.0), str(run_dir)), run_dir)
        await made.cluster.start()
        yield made.cluster
        await made.close()


async def test_both_see_one_device_and_so_do_their_successors(cluster: RayCluster) -> None:
    assert await cluster.reserve([ROOM]) == {"trainer": 1}
    engine, trainer = await cluster.spawn(worker("engine-0")), await cluster.spawn(worker("trainer-0"))
    first = await place(trainer)
    assert await place(engine) == first and first[1] in ("0", "1")
    for name, victim in (("engine-1", engine), ("trainer-1", trainer)):
        os.kill(victim.pid, signal.SIGKILL)
        assert (await anext(cluster.watch())).name == victim.name
        assert await place(await cluster.spawn(worker(name))) == first


async def test_room_is_held_for_both_or_for_nobody(cluster: RayCluster) -> None:
    """One device is left, and neither `train` nor `infer`."""
    with pytest.raises(WorkerFailed, match=r"at least 1 x 1 'train' and 1 'GPU' and 1 'infer' \(trainer\)") as caught:
        await cluster.reserve([ROOM])
    assert "\n" not in str(caught.value)
