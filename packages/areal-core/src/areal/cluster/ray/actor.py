"""The actor's class: a host that knows which of Ray's nodes it is on."""

from __future__ import annotations

import platform

import ray

from areal import env
from areal.cluster.host import Host
from areal.contracts.cluster import WorkerSpec


class RayHost(Host):
    """Invariant: on a cluster of many machines the worker says of itself the address at which the others reach it."""

    def __init__(self, spec: WorkerSpec, log_dir: str, has_many_nodes: bool) -> None:
        node = platform.node()
        if has_many_nodes:
            node = ray.util.get_node_ip_address()
            env.setdefault({"AREAL_NODE_ADDRESS": node})
        super().__init__(spec, log_dir, node, ray.get_runtime_context().get_node_id())
