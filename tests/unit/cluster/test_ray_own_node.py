"""The only node of a cluster that was made for a run dies: nothing can be started any more, and that is said."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray_site import Site, spec

from areal.cluster.ray import RayCluster, RayOptions
from areal.errors import WorkerFailed

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Ray waits for none of the processes it started once their node is dead.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def test_a_run_whose_own_node_died_is_told_that_its_cluster_is_gone(site: Site) -> None:
    await site.cluster.spawn(spec("first", resources={"infer": 1}))
    (raylet,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]
    raylet.kill()
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"Ray's own process on this machine|node has crashed"):
        await site.cluster.spawn(spec("at once"))
    assert time.monotonic() - began < 45  # and not when its own deadline is over
    with pytest.raises(WorkerFailed, match="second needs 1 'infer'"):
        await site.cluster.spawn(spec("second", resources={"infer": 1}))
    # In whatever order: the first worker's end, and that of everything, which each attempt finds anew.
    told: set[str] = set()
    while told != {"first", "Ray's"}:
        told.add((await _next_of(site)).partition(" ")[0])
    began = time.monotonic()
    await site.close()
    assert time.monotonic() - began < 30


async def _next_of(site: Site) -> str:
    try:
        return (await asyncio.wait_for(anext(site.cluster.watch()), 60)).name
    except WorkerFailed as error:
        return str(error)


@pytest.mark.parametrize("times_late", [1, 2])
async def test_when_ray_does_not_start_in_time_it_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times_late: int
) -> None:
    asked: list[object] = []

    def late(**options: object) -> None:
        asked.append(options["address"])
        if len(asked) <= times_late:
            raise Exception("The current node timed out during startup.")  # as Ray 2.60 does on an overloaded machine

    monkeypatch.setattr(ray, "init", late)
    cluster = RayCluster(RayOptions(), str(tmp_path))
    if times_late == 2:
        with pytest.raises(WorkerFailed, match=r"^Ray could not be started on this machine: The .* second attempt"):
            await cluster.start()
    else:
        await cluster.start()
    assert asked == ["local", "local"]


async def test_a_cluster_that_cannot_be_started_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**options: object) -> None:
        raise RuntimeError("no space for the object store")

    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(
        WorkerFailed, match=r"^Ray could not be started on this machine: no space for the object store$"
    ):
        await RayCluster(RayOptions(), str(tmp_path)).start()
