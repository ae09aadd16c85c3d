"""`areal run --address`: a run over several Ray nodes, whose engines' nodes are killed or cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import TOKEN, Nodes
from run_processes import SMALL, Processes, consumption, finish, run_folder, start, steps_of, wait_for_step, worker_pid

JOINED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
GROUPS = ("resources={train: {num_nodes: 1, gpus_per_node: 1}, infer: {num_nodes: 2, gpus_per_node: 1}}",)
HERE, THERE = "10.211.77.1", "10.211.77.2"
NAMESPACE = "areal-test"


def checked(run: Path, steps: int) -> None:
    assert steps_of(run) == list(range(1, steps + 1))
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * steps


@pytest.fixture
def three_nodes(ray_nodes: Nodes) -> Nodes:
    if not ray_nodes.nodes:
        ray_nodes.head(train=1)
        ray_nodes.add(infer=1)
        ray_nodes.add(infer=1)
    return ray_nodes


def test_a_run_trains_across_nodes_and_survives_the_death_of_one(
    tmp_path: Path, three_nodes: Nodes, processes: Processes
) -> None:
    process = start(
        tmp_path,
        "run",
        *SMALL,
        *GROUPS,
        "training.max_steps=200",
        "engine.replicas=2",
        "--cluster=ray",
        f"--address={three_nodes.address}",
        "--reshard=xccl",
        "reshard.shared_memory=never",
        **JOINED,
    )
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    run = run_folder(tmp_path)
    nodes = [three_nodes.with_worker(worker_pid(run, name)) for name in ("trainer-0", "engine-0", "engine-1")]
    assert len(set(nodes)) == 3
    three_nodes.add(infer=1)
    nodes[1].kill()
    output = " ".join(finish(process).split())
    assert process.returncode == 0, output
    assert "engine-0 was lost and is replaced: its node" in output, output
    assert (run / "logs" / "engine-2.log").exists()
    checked(run, 200)


def test_resume_on_another_cluster(tmp_path: Path, three_nodes: Nodes, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, "training.max_steps=3")
    processes.append(process)
    output = finish(process)
    assert process.returncode == 0, output
    run = run_folder(tmp_path)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("max_steps: 3", "max_steps: 5"))
    process = start(tmp_path, "resume", f"--address={three_nodes.address}", **JOINED)
    processes.append(process)
    output = finish(process)
    assert process.returncode == 0, output
    checked(run, 5)


def test_a_run_that_the_cluster_cannot_hold(tmp_path: Path, three_nodes: Nodes) -> None:
    wanted = ("resources.infer.num_gpus=8", "resources.infer.parallel=tp", "cluster.reserve_timeout_s=1")
    process = start(tmp_path, "run", *SMALL, *wanted, "--cluster=ray", f"--address={three_nodes.address}", **JOINED)
    output = finish(process)
    assert process.returncode == 2 and "Traceback" not in output, output
    said = " ".join(output.split())
    assert "the run needs at least 1 x 1 'train' (trainer) and 1 x 8 'infer' (engine), and within 1 s" in said
    assert "start a node with it (ray start --address=" in said


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def two_machines() -> Iterator[Nodes]:
    """Two nodes with addresses, host names and loopbacks of their own."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    try:
        _ip("netns", "add", NAMESPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    nodes = Nodes(namespaces={THERE: NAMESPACE})
    try:
        _ip("link", "add", "areal-here", "type", "veth", "peer", "name", "areal-there", "netns", NAMESPACE)
        _ip("addr", "add", f"{HERE}/24", "dev", "areal-here")
        _ip("link", "set", "areal-here", "up")
        _ip("-n", NAMESPACE, "addr", "add", f"{THERE}/24", "dev", "areal-there")
        _ip("-n", NAMESPACE, "link", "set", "areal-there", "up")
        _ip("-n", NAMESPACE, "link", "set", "lo", "up")
        yield nodes
    finally:
        nodes.close()
        _ip("netns", "delete", NAMESPACE)


def test_weights_travel_between_two_addresses(tmp_path: Path, two_machines: Nodes, processes: Processes) -> None:
    two_machines.head(ip=HERE, train=1)
    two_machines.add(ip=THERE, infer=1)
    process = start(
        tmp_path,
        "run",
        *SMALL,
        "training.max_steps=6",
        "--cluster=ray",
        f"--address={two_machines.address}",
        **JOINED,
    )
    processes.append(process)
    output = finish(process)
    assert process.returncode == 0, output
    checked(run_folder(tmp_path), 6)
    assert not list((run_folder(tmp_path) / "weights").glob("*")), "they went from memory to memory"
