"""Other machines of the cluster: their sizes in words, and functions that run there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")
Size = Mapping[str, float]


async def run_there(node_id: str, deadline_s: float, function: Callable[..., T], *args: Any) -> T:
    """Run a function of an installed module on a node, which may be frozen or gone: TimeoutError."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    answer = task.remote(*args)
    try:
        async with asyncio.timeout(deadline_s):
            return await answer
    except TimeoutError:
        ray.cancel(answer, force=True)
        raise
    except RayError as error:
        raise TimeoutError(f"the node {node_id} cannot be asked: {type(error).__name__}") from error


def sizes() -> dict[str, tuple[str, Size]]:
    """Return address and resources of every node that is alive, by its id."""
    return {node["NodeID"]: (node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]}


def in_words(resources: Size) -> str:
    """Return for example ``2 'infer' and 2 'GPU'``."""
    return " and ".join(f"{amount:g} {name!r}" for name, amount in resources.items())


def how_to_add(resources: Size) -> str:
    """Return the command that starts a node with these resources."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    flags = [f"--num-gpus={resources['GPU']:g}"] if resources.get("GPU") else []
    flags += [f"--resources='{json.dumps({name: _plain(amount) for name, amount in own.items()})}'"] if own else []
    head = ray.get_runtime_context().gcs_address
    return " ".join(["ray start", f"--address={head}", *flags])


def what_is_there(names: Mapping[str, float]) -> str:
    """Return for example ``1 'infer' (0 free) on 2 nodes`` for the resources of these names."""
    there, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{there.get(name, 0):g} {name!r} ({max(0.0, free.get(name, 0)):g} free)" for name in names]
    return f"{' and '.join(parts)} on {len(sizes())} node(s)"


def _plain(amount: float) -> float | int:
    return int(amount) if amount == int(amount) else amount
