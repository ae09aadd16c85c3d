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
    deaths = site.cluster.watch()
    assert (await asyncio.wait_for(anext(deaths), 60)).name == "first"
    with pytest.raises(WorkerFailed, match="second needs 1 'infer'"):
        await site.cluster.spawn(spec("second", resources={"infer": 1}))
    with pytest.raises(WorkerFailed, match="Ray's own process on this machine"):
        await asyncio.wait_for(anext(deaths), 5)
    began = time.monotonic()
    await site.close()
    assert time.monotonic() - began < 30


async def test_when_ray_does_not_start_in_time_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(**options: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray 2.60 does on an overloaded machine

    monkeypatch.setattr(ray, "init", too_late)
    with pytest.raises(WorkerFailed, match="Ray could not be started on this machine: The current node timed out"):
        await RayCluster(RayOptions(), str(tmp_path)).start()
