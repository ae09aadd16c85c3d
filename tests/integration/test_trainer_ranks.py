"""The trainer as two ranks in processes of their own: together they are one trainer, and they die together.

The tests go on from each other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
import toy_ranks
from safetensors.torch import load_file

from areal.cluster.ray import RayCluster, RayHandle, RayOptions
from areal.contracts.cluster import Handle, WorkerSpec
from areal.contracts.messages import Completion, Group, Outcome, Prompt, Trajectory
from areal.contracts.resharder import SHARDS
from areal.contracts.specs import BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal.contracts.transfer import Layout, Receipt, Transfer, piece_name, pieces_of
from areal.errors import ConfigError, TrainerLost
from areal.flow.trainer.checkpoint import Checkpoints
from areal.flow.trainer.seat import TrainerSeat
from areal.flow.trainer.worker import TrainerWorker, TrainRequest
from areal.plugins import discover
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 120.0


def request(step: int) -> TrainRequest:
    """Return one group of three answers whose rewards differ."""

    def trajectory(sample: int) -> Trajectory:
        turn = Completion(
            uid="",
            prompt_ids=(1, 9, step),
            token_ids=(5 + sample, 6, 7, 8),
            logprobs=(-4.0, -4.1, -4.2, -4.0),
            versions=(step - 1,) * 4,
            finish_reason="stop",
        )
        return Trajectory(group=step, sample=sample, turns=(turn,), outcome=Outcome.scored(float(sample == 0)))

    prompt = Prompt(environment="e", index=step, messages=())
    group = Group(number=step, prompt=prompt, trajectories=tuple(trajectory(sample) for sample in range(3)))
    return TrainRequest(step=step, version=step - 1, groups=(group,))


class Ledger:
    """Invariant: `named` are the steps of whole checkpoints, oldest first."""

    def __init__(self) -> None:
        self.named: list[tuple[int, str]] = []

    def checkpointed(self, step: int, path: str) -> None:
        self.named.append((step, path))

    def checkpoints(self) -> list[tuple[int, str]]:
        return self.named

    def forget_checkpoint(self, step: int) -> None: ...

    def compact(self, oldest_needed_step: int, max_bytes: int) -> bool:
        return False


class Site:
    """A Ray cluster with a trainer's seat. Invariant: `pids` are all processes that ever were ranks, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = RayCluster(RayOptions(), str(folder / "run"))
        self.model = tiny_model(folder / "model")
        self.seat = TrainerSeat(self.spawn, 2)
        self.pids: dict[str, int] = {}
        self.options = toy_ranks.ToyOptions(write_s=1.0)
        self.checkpoints = Checkpoints(self.seat, Ledger(), folder / "checkpoints", 9, DEADLINE_S)

    def args(self, rank: int, world_size: int) -> tuple[Any, ...]:
        plugins = discover()
        grpo = plugins.resolve("algorithm", "grpo")
        backend, options = (toy_ranks.COMPONENT, self.options)
        if world_size == 1:
            backend, options = plugins.resolve("backend", "torch"), None
        context = BackendContext(
            model=ModelSpec(path=self.model),
            training=TrainingSpec(learning_rate=1e-3),
            accelerator=HostCpu(),
            seed=0,
            rank=rank,
            devices=TrainerDevices(world_size=world_size, per_node=world_size),
        )
        return backend, options, context, grpo, grpo.parse_options({}), 1.0

    async def spawn(self, name: str, rank: int) -> Handle:
        spec = WorkerSpec(
            name=name,
            kind="trainer",
            factory="areal.flow.trainer.worker:TrainerWorker",
            args=self.args(rank, 2),
            environment={"OMP_NUM_THREADS": "1"},
        )
        handle: RayHandle = await self.cluster.spawn(spec)
        self.pids[name] = handle.pid
        return handle

    async def started(self) -> Layout:
        await self.seat.fill()
        return await self.seat.start(DEADLINE_S)

    async def train(self, step: int) -> dict[str, float]:
        metrics = await self.seat.call("train", request(step), deadline_s=DEADLINE_S)
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_AUTH_TOKEN", "f" * 64)
        made = Site(folder)
        await made.cluster.start()
        yield made
        await made.cluster.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over several threads may come out in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(site: Site, steps: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return what one rank of the builtin backend makes of the same requests."""
    worker = TrainerWorker(*site.args(0, 1))
    worker.make()
    worker.start()
    metrics = [worker.train(request(step)) for step in range(1, steps + 1)]
    worker.save(str(site.folder / "alone"))
    for found in metrics:
        del found["time/train_s"]
    return metrics, load_file(site.folder / "alone" / "model" / "model.safetensors")


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


SEEN: dict[str, Any] = {}
"""What a test leaves to the later ones."""


async def test_two_ranks_train_as_one_does(site: Site) -> None:
    layout = await site.started()
    assert list(site.seat.ranks) == ["trainer-0", "trainer-0.1"] and layout.num_ranks == 2
    SEEN["layout"] = layout
    SEEN["metrics"], SEEN["weights"] = alone(site, 4)
    assert [await site.train(step) for step in (1, 2)] == SEEN["metrics"][:2]


async def test_a_checkpoint_is_finished_beside_the_next_step(site: Site) -> None:
    await site.checkpoints.begin(2)
    finishing = asyncio.create_task(site.checkpoints.finish(2))
    assert await site.train(3) == SEEN["metrics"][2]
    assert not finishing.done() and not (site.folder / "checkpoints" / "step-00000002").exists()
    folder = await finishing
    assert sorted(path.name for path in folder.glob("rank-*")) == ["rank-0", "rank-1"]


@pytest.mark.parametrize("name", ["disk", "toy"])
async def test_each_rank_sends_its_pieces_and_one_receipt_comes_back(site: Site, name: str) -> None:
    layout: Layout = SEEN["layout"]
    chosen = toy_ranks.RESHARDER if name == "toy" else discover().resolve("resharder", name)
    options = chosen.parse_options({})
    source = layout if SHARDS in chosen.capabilities else replace(layout, pieces=())
    plan = chosen.load()(options, str(site.folder)).plan(source, [Layout(host=layout.host)])
    transfer = Transfer(phase="stage", version=3, resharder=chosen, options=options, plan=plan)
    await site.seat.call("begin_send", transfer, deadline_s=DEADLINE_S)
    receipt: Receipt = await site.seat.call("finish_send", deadline_s=DEADLINE_S)
    sent = [piece_name(source.tensors[piece.tensor], piece) for rank in range(2) for piece in pieces_of(source, rank)]
    assert sorted(receipt.checksums) == sorted(sent) and len(sent) > (len(source.tensors) if source.pieces else 0)
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in SEEN["weights"].values())


async def test_a_killed_rank_takes_the_others_with_it_and_another_group_goes_on(site: Site) -> None:
    os.kill(site.pids["trainer-0.1"], signal.SIGKILL)
    with pytest.raises(TrainerLost, match=r"^trainer-0\.1 died: killed from outside \(SIGKILL\)"):
        await site.train(4)
    assert site.seat.culprit == "trainer-0.1" and not is_alive(site.pids["trainer-0"])
    with pytest.raises(TrainerLost, match=r"^trainer-0\.1 died"):
        await site.train(4)
    await site.started()
    assert list(site.seat.ranks) == ["trainer-1", "trainer-1.1"]
    await site.seat.load(str(site.folder / "checkpoints" / "step-00000002"), DEADLINE_S)
    assert [await site.train(step) for step in (3, 4)] == SEEN["metrics"][2:]
    folder = await site.checkpoints.save(4)
    found = load_file(folder / "model" / "model.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in SEEN["weights"].items()), "as if nothing had happened"


async def test_a_stopped_rank_is_named_and_all_are_ended(site: Site) -> None:
    os.kill(site.pids["trainer-1.1"], signal.SIGSTOP)
    assert not await site.seat.ranks["trainer-1.1"].ping(0.5) and await site.seat.ranks["trainer-1"].ping(5.0)
    stacks = await site.seat.ranks["trainer-1.1"].stacks(2.0)
    assert "stopped (SIGSTOP)" in stacks
    training = asyncio.create_task(site.train(5))
    await asyncio.sleep(1.0)
    assert await site.seat.lost("trainer-1.1", "trainer-1.1 gave no sign of life for 0.5 s")
    with pytest.raises(TrainerLost, match=r"^trainer-1\.1 gave no sign of life for 0\.5 s$"):
        await training
    assert not is_alive(site.pids["trainer-1"]) and not is_alive(site.pids["trainer-1.1"])


async def test_a_rank_that_fails_leaves_no_other_waiting(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.flow.trainer.group.STRAGGLE_S", 2.0)
    site.options = toy_ranks.ToyOptions(broken_rank=0)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^rank 0 is broken$"):
        await site.started()
    assert time.monotonic() - began < DEADLINE_S
    assert not site.seat.ranks and not any(map(is_alive, site.pids.values()))
    site.options = toy_ranks.ToyOptions()


async def test_a_port_that_was_taken_is_no_end(site: Site) -> None:
    await site.seat.fill()
    where = await site.seat.call_first("rendezvous", deadline_s=DEADLINE_S)
    port = int(where.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
        pass  # the rank holds it until it starts
    await site.seat.call_first("rendezvous", deadline_s=DEADLINE_S)  # and gives the first one back
    with socket.create_server(("", port)):
        await site.seat.call("make", where, deadline_s=DEADLINE_S)
        with pytest.raises(TrainerLost, match=f"could not meet at {where}: another program has just taken the port"):
            await site.seat.call("start", deadline_s=DEADLINE_S)
    assert not site.seat.ranks
