"""The resharder `xccl`: which road a plan takes, and the process group when somebody misbehaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from areal.builtins.resharders import xccl
from areal.builtins.resharders.group import group_device
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, Plan, TensorSpec
from areal.errors import TransferFailed

TENSORS = tuple(TensorSpec(name=name, shape=(500, 40), dtype="float32") for name in ("a", "b", "c"))
SOURCE = Layout(host="one", tensors=TENSORS)
NEVER = XcclOptions(shared_memory="never", bucket_bytes=50_000)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, torch.full(spec.shape, float(value))) for spec in TENSORS]


def make_plan(source: Layout = SOURCE, *targets: Layout, options: XcclOptions | None = None) -> Plan:
    return XcclResharder(options, "").plan(source, targets or [Layout(host="one")])


@pytest.fixture
def halves() -> Iterator[Any]:
    """Return a function (plan) -> sender, receivers; closes them twice."""
    made: list[Any] = []

    def make(plan: Plan) -> tuple[Any, list[Any]]:
        resharder = XcclResharder(NEVER, "")
        sender = resharder.sender(plan)
        receivers = [resharder.receiver(plan, member) for member in range(len(plan.targets))]
        made.extend([sender, *receivers])
        return sender, receivers

    yield make
    for half in made * 2:
        half.close()


def exchange(sender: Any, receivers: list[Any], version: int, sent: Any = None) -> None:
    """Send one version to all receivers and compare it."""
    with ThreadPoolExecutor() as pool:
        arriving = [pool.submit(lambda receiver: dict(receiver.receive(version, 30)), each) for each in receivers]
        sender.send(version, sent or weights(version), 30)
        for future in arriving:
            assert all(bool((tensor == version).all()) for tensor in future.result().values())


def test_one_host_shares_memory() -> None:
    assert make_plan().details == {"road": "shared_memory"}


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ({}, {}, NEVER),
        ({"address": "10.0.0.1"}, {"host": "two"}, None),
        ({"collective": "nccl"}, {}, None),
    ],
)
def test_otherwise_gloo_carries(source: dict[str, Any], target: dict[str, Any], options: XcclOptions | None) -> None:
    plan = make_plan(
        Layout(**{"host": "one", "tensors": TENSORS, **source}), Layout(**{"host": "one", **target}), options=options
    )
    if "collective" in source:  # the engine speaks gloo only, and then both hold weights in host memory
        assert plan.details == {"road": "shared_memory"}
    else:
        assert plan.details["road"] == "collective" and plan.details["collective"] == "gloo"
        assert plan.details["port"] in range(20000, 32768)


def test_a_device_collective_is_taken_when_all_offer_it() -> None:
    layout = Layout(host="one", collective="nccl", tensors=TENSORS)
    assert make_plan(layout, layout).details["collective"] == "nccl"


def test_no_room_in_shared_memory_means_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(xccl, "room_for", lambda size: asked.append(size))
    assert make_plan(SOURCE, Layout(host="one", dtype="bfloat16")).details["road"] == "collective"
    whole_pages = -(-500 * 40 * 2 // PAGESIZE) * PAGESIZE
    assert asked == [2 * (3 * whole_pages + PAGESIZE)], "two segments, each with a page of counts"


def test_buckets_of_a_few_bytes_are_refused() -> None:
    assert XcclOptions(bucket_bytes=4096)
    with pytest.raises(ValidationError, match=r"bucket_bytes\n.* greater than or equal to 4096"):
        XcclOptions(bucket_bytes=4095)


def test_every_plan_has_its_own_uid() -> None:
    assert make_plan().uid != make_plan().uid


@pytest.mark.parametrize(
    ("source", "targets", "sentence"),
    [
        (Layout(host="one"), [Layout(host="one")], "names no tensors"),
        (SOURCE, [Layout(host="two")], "engine on two cannot reach the trainer on one at 127.0.0.1"),
        (SOURCE, [Layout(host="one"), Layout(host="one", dtype="bfloat16")], "hold weights as bfloat16 and float32"),
        (SOURCE, [Layout(host="one", dtype="bf16")], "names dtype 'bf16', which torch does not have"),
    ],
)
def test_impossible_plans_are_refused(source: Layout, targets: list[Layout], sentence: str) -> None:
    with pytest.raises(TransferFailed, match=sentence):
        make_plan(source, *targets)


def test_the_group_is_kept_between_versions_and_remade_after_a_failure(halves: Any) -> None:
    sender, receivers = halves(make_plan(SOURCE, Layout(host="one"), Layout(host="one"), options=NEVER))
    exchange(sender, receivers, 1)
    group = sender._outlet._group
    exchange(sender, receivers, 2)
    assert sender._outlet._group is group
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(lambda receiver: list(receiver.receive(3, 30)), each) for each in receivers]
        with pytest.raises(TransferFailed, match="stopped before 'c'"):
            sender.send(3, weights(3)[:2], 30)
        for future in waiting:
            with pytest.raises(TransferFailed, match="gave up version 3: the trainer stopped before 'c'"):
                future.result()
    exchange(sender, receivers, 3)
    assert sender._outlet._group is not group


def test_a_remade_receiver_gets_a_new_group(halves: Any) -> None:
    plan = make_plan(options=NEVER)
    sender, receivers = halves(plan)
    exchange(sender, receivers, 1)
    exchange(sender, [XcclResharder(NEVER, "").receiver(plan, 0)], 2)


def test_an_engine_that_stops_reading_is_named(halves: Any) -> None:
    sender, (receiver, other) = halves(make_plan(SOURCE, Layout(host="one"), Layout(host="one"), options=NEVER))
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, 1, weights(1), 30)
        waiting = pool.submit(lambda: list(other.receive(1, 30)))
        stream = receiver.receive(1, 30)
        next(stream)
        stream.close()
        with pytest.raises(TransferFailed, match=r"engine 0 \(127.0.0.1\) gave up: it stopped reading version 1$"):
            sending.result()
        with pytest.raises(TransferFailed, match="engine 0"):
            waiting.result()
    exchange(sender, [receiver, other], 2)


def test_a_missing_engine_is_named(halves: Any) -> None:
    sender, (first, _) = halves(make_plan(SOURCE, Layout(host="one"), Layout(host="one"), options=NEVER))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: list(first.receive(1, 30)))
        with pytest.raises(TransferFailed, match=r"^engine 1 \(127.0.0.1\) did not join .*version 1 within 0.5 s$"):
            sender.send(1, weights(1), 0.5)
        with pytest.raises(TransferFailed, match="refused version 1: engine 1"):
            waiting.result()


def test_a_wrong_version_is_refused_at_once(halves: Any) -> None:
    sender, (receiver,) = halves(make_plan(options=NEVER))
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, 1, weights(1), 2)
        with pytest.raises(TransferFailed, match="version 2 was asked for while version 1 is sent"):
            list(receiver.receive(2, 30))
        exchange_rest = dict(receiver.receive(1, 30))
        sending.result()
    assert exchange_rest["a"][0, 0] == 1


def test_a_port_that_was_taken_asks_for_a_new_plan(halves: Any) -> None:
    plan = make_plan(options=NEVER)
    sender, _ = halves(plan)
    with (
        socket.create_server(("127.0.0.1", plan.details["port"])),
        pytest.raises(TransferFailed, match=r"cannot listen at 127.0.0.1:\d+: .*in use; make a new plan"),
    ):
        sender.send(1, weights(1), 5)


def test_strangers_on_the_port_do_no_harm(halves: Any) -> None:
    plan = make_plan(options=NEVER)
    sender, (receiver,) = halves(plan)
    exchange(sender, [receiver], 1)
    address = ("127.0.0.1", plan.details["port"])
    with socket.create_connection(address) as web, socket.create_connection(address) as other:
        web.sendall(b"GET / HTTP/1.1\r\n\r\n")
        other.sendall(b'{"uid": "another plan", "member": 0}\n')
        exchange(sender, [receiver], 2)


def test_the_default_group_is_left_alone(halves: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exchange(*halves(make_plan(options=NEVER)), version=1)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("extended", [False, True])
def test_a_collective_that_a_plugin_registers_is_used(halves: Any, extended: bool) -> None:
    name = f"mine{int(extended)}"
    made: list[int] = []

    def simple(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(rank)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def full(options: Any, _: Any) -> Any:
        return simple(options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend.register_backend(name, full if extended else simple, extended_api=extended, devices=["cpu"])
    layout = Layout(host="one", collective=name, tensors=TENSORS)
    exchange(*halves(make_plan(layout, layout, options=NEVER)), version=1)
    assert sorted(made) == [0, 1]


def test_an_unknown_collective_is_refused(halves: Any) -> None:
    with pytest.raises(TransferFailed, match=r"collective 'hccl', but torch.distributed knows"):
        group_device("hccl")
    layout = Layout(host="one", collective="mpi", tensors=TENSORS)
    sender, (receiver,) = halves(make_plan(layout, layout, options=NEVER))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: list(receiver.receive(1, 10)))
        with pytest.raises(TransferFailed, match="'mpi', which cannot be made beside torch's default group"):
            sender.send(1, weights(1), 10)
        with pytest.raises(TransferFailed):
            waiting.result()
