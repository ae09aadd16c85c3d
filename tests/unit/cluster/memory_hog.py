"""A worker that takes more memory than Ray's monitor allows; prints how its death is reported. Run by a test."""

import asyncio
import os
import sys

import psutil

MEMORY = psutil.virtual_memory()
USED = (MEMORY.total - MEMORY.available) / MEMORY.total
# Read when Ray is imported, and for this cluster only.
os.environ |= {"RAY_memory_usage_threshold": f"{USED + 0.06:.3f}", "RAY_memory_monitor_refresh_ms": "100"}

from areal.cluster.ray import RayCluster, RayOptions  # noqa: E402
from areal.contracts.cluster import WorkerSpec  # noqa: E402
from areal.errors import WorkerDied  # noqa: E402


async def main(run_dir: str) -> None:
    cluster = RayCluster(RayOptions(), run_dir)
    await cluster.start()
    spec = WorkerSpec(name="hog", kind="rollout", factory="cluster_workers:Mortal")
    try:
        hog = await cluster.spawn(spec)
        await hog.call("take_memory", MEMORY.available // 2, deadline_s=30)
    except WorkerDied:
        death = await asyncio.wait_for(anext(cluster.watch()), 10)
        print(death.reason)
    finally:
        await cluster.close()


asyncio.run(main(sys.argv[1]))
