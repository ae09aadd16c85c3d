"""One segment written by several ranks: warm, whole, and never torn by a rank that comes too late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.builtins.resharders.shm import plan_folder, shm_sender
from areal.builtins.resharders.shm_receiver import ShmReceiver
from areal.builtins.resharders.xccl import XcclResharder
from areal.contracts.resharder import Interrupts
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec
from areal.errors import TransferFailed

ROWS = 300
Sent = list[tuple[str, torch.Tensor]]


@pytest.fixture
def plan() -> Iterator[Plan]:
    spec = TensorSpec(name="a", shape=(ROWS, 70), dtype="float32")
    pieces = tuple((Piece(tensor=0, start=(rank * 100, 0), shape=(100, 70)),) for rank in range(3))
    source = Layout(host="h", num_ranks=3, tensors=(spec,), pieces=pieces)
    plan = XcclResharder(None, "").plan(source, [Layout(host="h")])
    yield plan
    assert not plan_folder(plan.uid).exists()


@pytest.fixture
def senders(plan: Plan) -> Iterator[list[Any]]:
    senders = [shm_sender(plan, rank) for rank in range(3)]
    yield senders
    for sender in reversed(senders * 2):
        sender.close()


def rows(value: float) -> Sent:
    return [("a", torch.full((100, 70), float(value)))]


def publish(senders: list[Any], version: int) -> None:
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(sender.send, version, rows(version), 10) for sender in senders]:
            future.result()


def segments(plan: Plan) -> dict[str, int]:
    """Return the inode of each segment by its name."""
    found = [path for pattern in ("v????????", "draft-*") for path in plan_folder(plan.uid).glob(pattern)]
    return {path.name: path.stat().st_ino for path in found}


def mapped_segments(plan: Plan) -> int:
    """Return how many mappings of the plan's segments this process has."""
    return sum(plan.uid in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


def received(plan: Plan, version: int) -> float:
    (_, tensor), *_ = ShmReceiver(plan, 0).receive(version, 10)
    assert bool((tensor == tensor[0, 0]).all())
    return float(tensor[0, 0])


def test_two_warm_segments_serve_all_ranks(plan: Plan, senders: list[Any]) -> None:
    inodes: set[int] = set()
    for version in range(1, 7):
        publish(senders, version)
        assert received(plan, version) == version
        inodes |= set(segments(plan).values())
    assert len(inodes) == len(segments(plan)) == 2
    assert mapped_segments(plan) == 6, "each rank keeps both mapped"


def test_segments_that_are_given_back_are_let_go_by_all_ranks(plan: Plan, senders: list[Any]) -> None:
    held: list[Any] = []
    for version in range(1, 5):
        publish(senders, version)
        held.append(list(ShmReceiver(plan, 0).receive(version, 10)))
    assert len(segments(plan)) == 4
    held.clear()
    for version in (5, 6):
        publish(senders, version)
    assert len(segments(plan)) == 2
    assert mapped_segments(plan) == 6


def test_a_rank_that_is_late_tears_no_later_version(plan: Plan, senders: list[Any]) -> None:
    for version in (1, 2):
        publish(senders, version)
    goes_on = threading.Event()

    def stalling() -> Iterator[tuple[str, torch.Tensor]]:
        goes_on.wait(30)
        yield from rows(77)

    with ThreadPoolExecutor() as pool:
        late = pool.submit(senders[1].send, 3, stalling(), 30)
        others = [pool.submit(senders[rank].send, 3, rows(3), 1) for rank in (0, 2)]
        with pytest.raises(TransferFailed, match=r"trainer rank 1 did not write version 3 within 1 s"):
            others[0].result()
        with pytest.raises(TransferFailed, match=r"trainer rank 0 (gave up|did not publish) version 3"):
            others[1].result()
        # Rank 1 is still at it; its seat is taken by a new sender of the same process, as after a restart.
        senders[1], old = shm_sender(plan, 1), senders[1]
        old._seat.close()
        publish(senders, 4)
        before = received(plan, 4)
        goes_on.set()
        old.interrupt()
        with pytest.raises(TransferFailed, match="version 3"):
            late.result()
        old.close()
        assert before == received(plan, 4) == 4
        publish(senders, 5)
        assert received(plan, 5) == 5


def test_a_rank_whose_lead_never_comes_can_be_told_so(plan: Plan, senders: list[Any]) -> None:
    assert isinstance(senders[0], Interrupts) and isinstance(senders[2], Interrupts)
    for waiting, sent in ((senders[2], rows(1)), (senders[0], rows(1))):
        with ThreadPoolExecutor() as pool:
            began = time.monotonic()
            sending = pool.submit(waiting.send, 1, sent, 60)
            time.sleep(0.2)
            assert not sending.done()
            waiting.interrupt()
            with pytest.raises(TransferFailed, match="trainer rank"):
                sending.result()
            assert time.monotonic() - began < 10


def test_a_second_sender_of_a_rank_is_one_too_many(plan: Plan, senders: list[Any]) -> None:
    publish(senders, 1)
    second = shm_sender(plan, 2)
    with ThreadPoolExecutor() as pool:
        sending = [pool.submit(senders[rank].send, 2, rows(2), 2) for rank in (0, 1)]
        with pytest.raises(TransferFailed, match="another sender of trainer rank 2 is alive"):
            second.send(2, rows(2), 2)
        for future in sending:
            with pytest.raises(TransferFailed, match=r"trainer rank [02]"):
                future.result()
    publish(senders, 3)
    assert received(plan, 3) == 3


def test_nothing_stays_in_shared_memory(plan: Plan, senders: list[Any]) -> None:
    publish(senders, 1)
    names = {path.name for path in plan_folder(plan.uid).iterdir()}
    assert {"owner", "verdict", "rank-1", "rank-1.wrote", "rank-2"} <= names
    for sender in reversed(senders):
        sender.close()
    assert not plan_folder(plan.uid).exists()
    assert mapped_segments(plan) == 0
