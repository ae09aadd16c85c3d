"""A send through shared memory in two halves: what was taken may change, and is delivered or given up."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from areal.algorithms.update.sending import BackgroundSender
from areal.builtins.resharders.shm import plan_folder, shm_sender
from areal.builtins.resharders.shm_receiver import ShmReceiver
from areal.builtins.resharders.xccl import XcclResharder
from areal.contracts.component import Component
from areal.contracts.resharder import Takes
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec, Transfer, checksum
from areal.errors import TransferFailed

NAMES = ("a", "b")
Sent = list[tuple[str, torch.Tensor]]


@pytest.fixture(params=[1, 2])
def plan(request: pytest.FixtureRequest) -> Iterator[Plan]:
    """Of a trainer of one rank, and of two that share each tensor."""
    num_ranks = request.param
    specs = tuple(TensorSpec(name=name, shape=(100 * num_ranks, 7), dtype="float32") for name in NAMES)
    pieces = tuple(
        tuple(Piece(tensor=index, start=(rank * 100, 0), shape=(100, 7)) for index in range(len(NAMES)))
        for rank in range(num_ranks)
    )
    source = Layout(host="h", num_ranks=num_ranks, tensors=specs, pieces=pieces)
    plan = XcclResharder(None, "").plan(source, [Layout(host="h", dtype="bfloat16")])
    yield plan
    assert not plan_folder(plan.uid).exists()


@pytest.fixture
def senders(plan: Plan) -> Iterator[list[Any]]:
    senders = [shm_sender(plan, rank) for rank in range(plan.source.num_ranks)]
    yield senders
    for sender in reversed(senders * 2):
        sender.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def weights(value: float) -> Sent:
    return [(name, torch.full((100, 7), float(value))) for name in NAMES]


def take(pool: ThreadPoolExecutor, senders: list[Any], version: int, sent: list[Sent], deadline_s: float = 30) -> None:
    futures = [pool.submit(sender.take, version, own, deadline_s) for sender, own in zip(senders, sent, strict=True)]
    for future in futures:
        future.result()


def receive(pool: ThreadPoolExecutor, plan: Plan, version: int) -> Future[dict[str, torch.Tensor]]:
    return pool.submit(lambda: dict(ShmReceiver(plan, 0).receive(version, 30)))


def holds(tensors: dict[str, torch.Tensor], value: float) -> bool:
    return tensors.keys() == set(NAMES) and all(bool((tensor == value).all()) for tensor in tensors.values())


def test_what_was_taken_may_change(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    assert all(isinstance(sender, Takes) for sender in senders)
    for version in (1, 2, 3):
        sent = [weights(version) for _ in senders]
        take(pool, senders, version, sent)
        for own in sent:
            for _, tensor in own:
                tensor.fill_(-1)
        arriving = receive(pool, plan, version)
        time.sleep(0.05)
        assert not arriving.done(), "what nobody has delivered is no version"
        receipts = [future.result() for future in [pool.submit(sender.deliver) for sender in senders]]
        assert holds(arriving.result(), version)
        wanted = checksum(torch.full((100, 7), float(version), dtype=torch.bfloat16))
        for receipt in receipts:
            assert receipt.version == version and receipt.num_bytes == 2 * 100 * 7 * len(NAMES)
            assert set(receipt.checksums.values()) == {wanted} and len(receipt.checksums) == len(NAMES)


def test_a_trainer_that_goes_on_keeps_no_copy_of_its_own(plan: Plan, pool: ThreadPoolExecutor) -> None:
    resharder = Component(name="xccl", factory="areal.builtins.resharders.xccl:XcclResharder")
    transfer = Transfer(phase="stage", version=1, resharder=resharder, options=None, plan=plan, deadline_s=30)
    ranks = [BackgroundSender(rank) for rank in range(plan.source.num_ranks)]
    sent = [weights(1) for _ in ranks]
    for future in [pool.submit(rank.take, transfer, own) for rank, own in zip(ranks, sent, strict=True)]:
        future.result()
    for own, rank in zip(sent, ranks, strict=True):
        assert not rank._copies
        for _, tensor in own:
            tensor.fill_(-1)
    arriving = receive(pool, plan, 1)
    for future in [pool.submit(rank.deliver) for rank in ranks]:
        assert future.result().version == 1
    assert holds(arriving.result(), 1)
    for rank in reversed(ranks):
        rank.close()


def test_a_second_take_gives_the_first_up(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    take(pool, senders, 1, [weights(1) for _ in senders])
    arriving = receive(pool, plan, 1)
    time.sleep(0.05)
    take(pool, senders, 2, [weights(2) for _ in senders])
    with pytest.raises(TransferFailed, match=r"version 1.* took another version before this one was delivered"):
        arriving.result()
    arriving = receive(pool, plan, 2)
    for future in [pool.submit(sender.deliver) for sender in senders]:
        assert future.result().version == 2
    assert holds(arriving.result(), 2)
    for sender in senders:
        with pytest.raises(TransferFailed, match="had not taken"):
            sender.deliver()


def test_the_same_version_can_be_taken_again(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    for value in (1, 2, 3):
        take(pool, senders, 7, [weights(value) for _ in senders])
    arriving = receive(pool, plan, 7)
    for future in [pool.submit(sender.deliver) for sender in senders]:
        future.result()
    assert holds(arriving.result(), 3)


def test_closing_gives_up_what_was_taken(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    take(pool, senders, 1, [weights(1) for _ in senders])
    receiver = ShmReceiver(plan, 0)
    reading = receiver.receive(1, 30)
    next(reading)
    began = time.monotonic()
    for sender in senders:
        sender.close()
    with pytest.raises(TransferFailed, match="gave up version 1"):
        list(reading)
    assert time.monotonic() - began < 10
    for sender in senders:
        with pytest.raises(TransferFailed, match="had not taken"):
            sender.deliver()


def test_a_source_that_breaks_leaves_nothing_to_deliver(
    plan: Plan, senders: list[Any], pool: ThreadPoolExecutor
) -> None:
    arriving = receive(pool, plan, 1)
    others = [pool.submit(sender.take, 1, weights(1), 30) for sender in senders[1:]]
    with pytest.raises(TransferFailed, match="stopped before 'b'"):
        senders[0].take(1, weights(1)[:1], 30)
    with pytest.raises(TransferFailed, match="gave up version 1: the trainer stopped before 'b'"):
        arriving.result()
    with pytest.raises(TransferFailed, match="had not taken"):
        senders[0].deliver()
    for future, sender in zip(others, senders[1:], strict=True):
        with pytest.raises(TransferFailed, match="trainer rank 0 gave up version 1"):
            future.result()
            sender.deliver()


@pytest.mark.parametrize("plan", [2], indirect=True)
class TestTwoRanks:
    def test_a_rank_that_gives_up_is_named(self, plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
        take(pool, senders, 1, [weights(1) for _ in senders])
        arriving = receive(pool, plan, 1)
        senders[1].close()
        with pytest.raises(TransferFailed, match="trainer rank 1 gave up version 1: it was closed"):
            senders[0].deliver()
        with pytest.raises(TransferFailed, match="trainer rank 1 gave up version 1: it was closed"):
            arriving.result()

    def test_a_rank_keeps_its_lock_until_it_has_delivered(
        self, plan: Plan, senders: list[Any], pool: ThreadPoolExecutor
    ) -> None:
        take(pool, senders, 1, [weights(1) for _ in senders])
        (segment,) = plan_folder(plan.uid).glob("draft-*")
        with segment.open("rb") as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for future in [pool.submit(sender.deliver) for sender in senders]:
                future.result()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @pytest.mark.parametrize("waiting", [0, 1])
    def test_an_interrupt_ends_either_half(
        self, plan: Plan, senders: list[Any], pool: ThreadPoolExecutor, waiting: int
    ) -> None:
        began = time.monotonic()
        # The lead delivers and the other has taken nothing; the other takes and the lead never comes.
        if waiting == 0:
            senders[0].take(1, weights(1), 60)
            future = pool.submit(senders[0].deliver)
        else:
            future = pool.submit(senders[1].take, 1, weights(1), 60)
        time.sleep(0.2)
        assert not future.done()
        senders[waiting].interrupt()
        with pytest.raises(TransferFailed, match=f"trainer rank {1 - waiting}"):
            future.result()
        if waiting == 0:
            return
        take(pool, senders, 2, [weights(2) for _ in senders], 60)
        future = pool.submit(senders[1].deliver)
        time.sleep(0.2)
        assert not future.done()
        senders[1].interrupt()
        with pytest.raises(TransferFailed, match="trainer rank 0 did not publish version 2"):
            future.result()
        with pytest.raises(TransferFailed, match="trainer rank 1 gave up version 2"):
            senders[0].deliver()
        assert time.monotonic() - began < 30
