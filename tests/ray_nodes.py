"""A Ray cluster of several nodes on one machine, made as docs/cluster.md says: one `ray start` a node."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

TOKEN = "f" * 64
HEALTH_CHECKS = {
    # Slower than those that docs/cluster.md advises: a test machine may be busy, and a node that is slow is not dead.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
START_S = 60.0


class Node:
    """One node: `ray start --block` and all below it. Invariant: `processes` are its own, workers included."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def processes(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def has(self, pid: int) -> bool:
        return any(process.pid == pid for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait(30)

    def freeze(self) -> list[psutil.Process]:
        """Stop everything; return what was stopped."""
        stopped = self.processes
        for process in stopped:
            process.suspend()
        return stopped


class Nodes:
    """The cluster. Invariant: nothing of it is left after `close`, and nothing is written into the user's home."""

    def __init__(self, namespaces: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets' paths must be short
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.nodes: list[Node] = []
        self._namespaces = namespaces or {}

    def head(self, *, ip: str = "127.0.0.1", num_gpus: int = 0, **resources: float) -> Node:
        """`num_gpus`: what Ray is told; it looks at none."""
        self.address = f"{ip}:{self.port}"
        where = [
            f"--port={self.port}",
            "--include-dashboard=false",
            f"--temp-dir={self.folder}",
            f"--num-gpus={num_gpus}",
        ]
        return self._start(ip, ["--head", *where], resources)

    def add(self, *, ip: str = "127.0.0.1", **resources: float) -> Node:
        return self._start(ip, [f"--address={self.address}"], resources)

    def with_worker(self, pid: int) -> Node:
        return next(node for node in self.nodes if node.has(pid))

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, ip: str, arguments: list[str], resources: Mapping[str, float]) -> Node:
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
        command += ["--disable-usage-stats", f"--node-ip-address={ip}", f"--resources={json.dumps(resources)}"]
        command += arguments
        if namespace := self._namespaces.get(ip):  # another machine has another name, too
            renamed = ["unshare", "--uts", "sh", "-c", f'hostname {namespace}; exec "$0" "$@"']
            command = ["ip", "netns", "exec", namespace, *renamed, *command]
        with (self.folder / f"node-{len(self.nodes)}.out").open("wb") as output:
            environment = {**os.environ, **HEALTH_CHECKS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        self.nodes.append(Node(process))
        give_up = time.monotonic() + START_S
        # One after the other: two that start at once under one folder get into each other's way.
        while b"Ray runtime started" not in Path(output.name).read_bytes():
            if process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"no node: {Path(output.name).read_text()}")
            time.sleep(0.1)
        return self.nodes[-1]
