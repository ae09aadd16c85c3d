"""A Ray cluster for a module's tests, as the run starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.cluster.ray import RayCluster
from areal.contracts.cluster import WorkerSpec


def spec(name: str, *args: Any, factory: str = "cluster_workers:Worker", **more: Any) -> WorkerSpec:
    return WorkerSpec(name=name, kind="rollout", factory=factory, args=args, **more)


class Site:
    """The module's Ray cluster. Invariant: closed at most once."""

    def __init__(self, cluster: RayCluster, run_dir: Path) -> None:
        self.cluster, self.run_dir, self.closed = cluster, run_dir, False
        self.pids: list[int] = []

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.cluster.close()

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name}.log").read_text()
