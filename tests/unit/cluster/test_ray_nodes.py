"""Several nodes: who sits where, and what happens when one of them dies or freezes. The tests go on from each other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from ray_nodes import TOKEN, Nodes
from ray_site import Site

from areal.cluster.process import Process
from areal.cluster.ray import RayCluster, RayHandle, RayOptions
from areal.contracts.cluster import Room, WorkerDeath, WorkerSpec
from areal.errors import WorkerFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = {"infer": 1.0}


def worker(name: str, kind: str = "engine") -> WorkerSpec:
    resources = {"engine": ENGINE, "trainer": {"train": 1.0}, "rollout": {}}[kind]
    return WorkerSpec(name=name, kind=kind, factory="cluster_workers:Mortal", resources=resources)


def rooms(least: int) -> list[Room]:
    return [
        Room(kind="trainer", resources={"train": 1.0}, count=1, least=1),
        Room(kind="engine", resources=ENGINE, count=3, least=least),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def joined(ray_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        ray_nodes.head(train=1)
        ray_nodes.add(infer=1)
        ray_nodes.add(infer=1)
        options = RayOptions(address=ray_nodes.address, reserve_timeout_s=2.0)
        made = Site(RayCluster(options, str(run_dir)), run_dir)
        await made.cluster.start()
        yield made
        await made.close()


@pytest.fixture
def cluster(joined: Site) -> RayCluster:
    joined.cluster._first_failure = None
    return joined.cluster


async def next_death(cluster: RayCluster) -> WorkerDeath:
    return await asyncio.wait_for(anext(cluster.watch()), 30)


HELD: dict[str, RayHandle] = {}
"""The workers of the module, by name."""


async def test_a_run_that_does_not_fit_is_told_what_to_start(cluster: RayCluster) -> None:
    async with asyncio.timeout(15):
        with pytest.raises(WorkerFailed) as caught:
            await cluster.reserve(rooms(least=3))
    said = str(caught.value)
    assert "needs at least 1 x 1 'train' (trainer) and 3 x 1 'infer' (engine)" in said
    assert "1 'train' (1 free) and 2 'infer' (2 free) on 3 node(s)" in said
    assert "ray start --address=" in said and """--resources='{"infer": 1}'""" in said


async def test_another_token_is_refused_in_one_sentence(ray_nodes: Nodes, tmp_path: Path) -> None:
    said = f"the Ray cluster at {ray_nodes.address!r} could not be joined: it does not accept our token; set RAY_AUTH"
    code = "import asyncio, sys; from areal.cluster.ray import *; "
    code += "asyncio.run(RayCluster(RayOptions(address=sys.argv[1]), sys.argv[2]).start())"
    wrong = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    command = [sys.executable, "-c", code, ray_nodes.address, str(tmp_path)]
    ended = await asyncio.to_thread(subprocess.run, command, env=wrong, capture_output=True, text=True, timeout=60)
    assert said in ended.stderr


async def test_what_fits_is_reserved_and_engines_spread(cluster: RayCluster) -> None:
    assert await cluster.reserve(rooms(least=1)) == {"trainer": 1, "engine": 2}
    for name, kind in [("trainer-0", "trainer"), ("engine-0", "engine"), ("engine-1", "engine"), ("r-0", "rollout")]:
        HELD[name] = await cluster.spawn(worker(name, kind))
    places = [HELD[name].process.node_id for name in ("trainer-0", "engine-0", "engine-1")]
    assert len(set(places)) == 3
    # Other machines reach a worker at its node's address, not at their own loopback.
    address = await HELD["engine-0"].call("environment", "AREAL_NODE_ADDRESS")
    assert address == HELD["engine-0"].node and not address.startswith("127.")


async def test_one_too_many_is_refused_and_does_not_hang(cluster: RayCluster) -> None:
    began = time.monotonic()
    said = (
        r"engine-2 needs 1 'infer' on one node, .* has 2 'infer' \(0 free\) on 3 node\(s\); start a node with it \(ray"
    )
    with pytest.raises(WorkerFailed, match=said):
        await cluster.spawn(worker("engine-2"))
    assert time.monotonic() - began < 15


async def test_a_successor_takes_the_place_of_the_dead(cluster: RayCluster) -> None:
    place = HELD["engine-0"].process.node_id
    os.kill(HELD["engine-0"].pid, signal.SIGKILL)
    assert (await next_death(cluster)).reason.startswith("killed from outside (SIGKILL): ")
    HELD["engine-2"] = await cluster.spawn(worker("engine-2"))
    assert HELD["engine-2"].process.node_id == place


async def test_the_death_of_a_node(cluster: RayCluster, ray_nodes: Nodes) -> None:
    ray_nodes.add(infer=1)
    node = ray_nodes.with_worker(HELD["engine-2"].pid)
    place = HELD["engine-2"].process.node_id
    there = {name for name in ("engine-2", "r-0") if HELD[name].process.node_id == place}  # r-0 may be anywhere
    began = time.monotonic()
    node.kill()
    deaths = {death.name: death for death in [await next_death(cluster) for _ in there]}
    noticed_s = time.monotonic() - began
    assert deaths.keys() == there
    death = deaths["engine-2"]
    assert death.reason.startswith(f"its node {HELD['engine-2'].node} died: "), death.reason
    assert noticed_s < 30
    print(f"\na killed node was noticed after {noticed_s:.1f} s")
    HELD["engine-3"] = await cluster.spawn(worker("engine-3"))
    assert await HELD["engine-3"].call("echo", 3) == 3
    assert HELD["engine-3"].process.node_id not in (HELD["engine-2"].process.node_id, HELD["engine-1"].process.node_id)


async def test_a_frozen_node(cluster: RayCluster, ray_nodes: Nodes) -> None:
    victim = HELD["engine-3"]
    node = ray_nodes.with_worker(victim.pid)
    began = time.monotonic()
    stopped = node.freeze()
    assert not await victim.ping(0.5)
    assert "is stopped (SIGSTOP)" in await victim.stacks(2.0)
    death = await next_death(cluster)
    noticed_s = time.monotonic() - began
    assert death.name == "engine-3" and "died: health check failed" in death.reason
    assert noticed_s < 30
    print(f"\na frozen node was noticed after {noticed_s:.1f} s")
    with pytest.raises(WorkerFailed, match="engine-4 needs 1 'infer'"):
        await cluster.spawn(worker("engine-4"))
    for process in stopped:
        process.resume()
    _, alive = await asyncio.to_thread(psutil.wait_procs, stopped, 20)
    assert not alive, "a node that was given up ends itself when it thaws"


async def test_a_worker_of_another_machine(
    cluster: RayCluster, ray_nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process ids and the run's folder mean nothing there: its node is asked."""
    ray_nodes.add(infer=1)
    monkeypatch.setattr(Process, "is_here", False)
    monkeypatch.setattr(cluster, "_log_dir", tmp_path / "not there")
    far = await cluster.spawn(worker("engine-5"))
    assert Path(far.process.log_file).parent.name.startswith("areal-logs-")
    await far.call("say", "far away")
    monkeypatch.setattr(Path, "open", _refuse(Path(far.process.log_file)))
    holding = asyncio.create_task(far.call("hold_the_interpreter"))
    await asyncio.sleep(0.3)
    assert "in hold_the_interpreter" in await far.stacks(10.0)
    holding.cancel()
    os.kill(far.pid, signal.SIGSEGV)
    death = await next_death(cluster)
    assert death.reason.startswith("it was ended by SIGSEGV; its log ends with:") and "far away" in death.reason
    stopped = await cluster.spawn(worker("engine-6"))
    process = psutil.Process(stopped.pid)
    process.suspend()
    await stopped.kill()
    assert not psutil.wait_procs([process], timeout=5)[1]
    assert (await next_death(cluster)).reason == "it was ended by the controller"


def _refuse(hidden: Path):
    opened = Path.open

    def open_others(path: Path, *args: object, **more: object) -> object:
        if path == hidden:
            raise FileNotFoundError(path)
        return opened(path, *args, **more)  # type: ignore[call-overload]

    return open_others
