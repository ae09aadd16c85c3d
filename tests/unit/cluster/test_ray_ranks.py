"""Ranks of one trainer over two nodes: neighbours sit together, and each place has one owner."""

from __future__ import annotations

import asyncio
import os
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

DEVICE = {"train": 1.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def joined(ray_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        ray_nodes.head(train=2)
        ray_nodes.add(train=3)
        options = RayOptions(address=ray_nodes.address, reserve_timeout_s=2.0)
        made = Site(RayCluster(options, str(run_dir)), run_dir)
        await made.cluster.start()
        yield made
        await made.close()


def room(count: int, together: int, *, apart: bool) -> Room:
    return Room(kind="trainer", resources=DEVICE, count=count, least=count, together=together, apart=apart)


async def spawn(cluster: RayCluster, name: str, place: int) -> RayHandle:
    spec = WorkerSpec(name=name, kind="trainer", factory="cluster_workers:Mortal", resources=DEVICE, place=place)
    return await cluster.spawn(spec)


async def test_a_node_that_does_not_hold_all_neighbours_is_no_place_for_them(joined: Site) -> None:
    with pytest.raises(WorkerFailed, match=r"needs at least 1 x 4 'train' \(trainer\), .* 5 'train' \(5 free\)"):
        await joined.cluster.reserve([room(4, 4, apart=False)])


async def test_ranks_sit_in_their_places_whoever_asks_first(joined: Site) -> None:
    cluster = joined.cluster
    assert await cluster.reserve([room(4, 2, apart=True)]) == {"trainer": 4}
    order = (3, 0, 2, 1)
    handles = await asyncio.gather(*(spawn(cluster, f"trainer-0.{place}", place) for place in order))
    nodes = {place: handle.process.node_id for place, handle in zip(order, handles, strict=True)}
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    # All are ended at once and others take their places: the fifth device is nobody's.
    ending = asyncio.gather(*(handle.kill() for handle in handles))
    successors = await asyncio.gather(*(spawn(cluster, f"trainer-1.{place}", place) for place in range(4)))
    await ending
    assert [handle.process.node_id for handle in successors] == [nodes[place] for place in range(4)]
