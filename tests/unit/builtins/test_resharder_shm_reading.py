"""Reading behind the ranks that write: tensors come early, whole, and never from two attempts."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.builtins.resharders import shm_receiver
from areal.builtins.resharders.segment import Form, Progress
from areal.builtins.resharders.shm import plan_folder, shm_sender
from areal.builtins.resharders.shm_receiver import ShmReceiver
from areal.builtins.resharders.xccl import XcclResharder
from areal.contracts.transfer import Layout, Piece, Plan, Receipt, TensorSpec
from areal.errors import TransferFailed

NAMES = ("a", "b", "c", "d")
ROWS = 5
"""Of one rank: four tensors would fit into one page."""


def make_plan(num_ranks: int) -> Plan:
    specs = tuple(TensorSpec(name=name, shape=(ROWS * num_ranks, 3), dtype="float32") for name in NAMES)
    pieces = tuple(
        tuple(Piece(tensor=index, start=(rank * ROWS, 0), shape=(ROWS, 3)) for index in range(len(NAMES)))
        for rank in range(num_ranks)
    )
    source = Layout(host="h", num_ranks=num_ranks, tensors=specs, pieces=pieces)
    return XcclResharder(None, "").plan(source, [Layout(host="h")])


@pytest.fixture(params=[1, 2])
def plan(request: pytest.FixtureRequest) -> Iterator[Plan]:
    plan = make_plan(request.param)
    yield plan
    assert not plan_folder(plan.uid).exists()


@pytest.fixture
def senders(plan: Plan) -> Iterator[list[Any]]:
    senders = [shm_sender(plan, rank) for rank in range(plan.source.num_ranks)]
    yield senders
    for sender in reversed(senders):
        sender.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Tap:
    """One rank's weights, given one by one. Invariant: never more than was let through."""

    def __init__(self, value: float) -> None:
        self._value = value
        self._drops = threading.Semaphore(0)
        self.breaks = False

    def let(self, number: int) -> None:
        self._drops.release(number)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            assert self._drops.acquire(timeout=60)
            if self.breaks:
                raise RuntimeError("the source broke")
            yield name, torch.full((ROWS, 3), self._value)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((ROWS, 3), float(value))) for name in NAMES]


def begin(pool: ThreadPoolExecutor, senders: list[Any], version: int = 1) -> tuple[list[Tap], list[Future[Receipt]]]:
    """Have all ranks send a version of weights that are its number, each as far as its tap lets them through."""
    taps = [Tap(version) for _ in senders]
    return taps, [pool.submit(sender.send, version, tap, 60) for sender, tap in zip(senders, taps, strict=True)]


def publish(pool: ThreadPoolExecutor, senders: list[Any], version: int, value: float) -> None:
    for future in [pool.submit(sender.send, version, weights(value), 30) for sender in senders]:
        future.result()


def test_each_tensor_comes_when_all_ranks_have_written_it(
    plan: Plan, senders: list[Any], pool: ThreadPoolExecutor
) -> None:
    receiver = ShmReceiver(plan, 0)
    for version in (1, 2, 3):
        taps, sending = begin(pool, senders, version)
        reading = receiver.receive(version, 60)
        for tap in taps[1:]:
            tap.let(len(NAMES))
        for name in NAMES:
            arriving = pool.submit(next, reading)
            time.sleep(0.02)
            assert not arriving.done()
            taps[0].let(1)
            found, tensor = arriving.result(30)
            assert found == name and bool((tensor == version).all())
        assert not list(reading)
        for future in sending:
            assert future.result().version == version
    receiver.close()


def test_what_a_consumer_writes_hides_nothing_that_comes_later(
    plan: Plan, senders: list[Any], pool: ThreadPoolExecutor
) -> None:
    taps, sending = begin(pool, senders)
    reading = ShmReceiver(plan, 0).receive(1, 60)
    for _ in NAMES:
        for tap in taps:
            tap.let(1)
        _, tensor = next(reading)
        assert bool((tensor == 1).all())
        tensor.fill_(-1)
    assert not list(reading)
    for future in sending:
        future.result()


def test_a_version_that_is_given_up_half_way_raises(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    receiver = ShmReceiver(plan, 0)
    taps, sending = begin(pool, senders)
    reading = receiver.receive(1, 60)
    for tap in taps:
        tap.let(2)
    held = [next(reading), next(reading)]
    taps[-1].breaks = True
    for tap in taps:
        tap.let(2)
    with pytest.raises(TransferFailed, match=r"gave up version 1: .*the source broke"):
        list(reading)
    for future in sending:
        with pytest.raises(TransferFailed, match="gave up version 1"):
            future.result()
    for value in (2, 3, 4):
        publish(pool, senders, 1, value)
        assert all(bool((tensor == value).all()) for _, tensor in receiver.receive(1, 60))
    assert all(bool((tensor == 1).all()) for _, tensor in held), "its segment was chosen again"
    receiver.close()


def test_two_attempts_are_never_mixed(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    receiver = ShmReceiver(plan, 0)
    taps, sending = begin(pool, senders)
    reading = receiver.receive(1, 60)
    for tap in taps:
        tap.let(1)
    next(reading)
    taps[0].breaks = True
    for tap in taps:
        tap.let(3)
    for future in sending:
        with pytest.raises(TransferFailed):
            future.result()
    publish(pool, senders, 1, 2)  # before the receiver looks again
    with pytest.raises(TransferFailed, match="gave up version 1 while it was being read"):
        list(reading)
    assert all(bool((tensor == 2).all()) for _, tensor in receiver.receive(1, 60))
    receiver.close()


def test_a_version_is_read_to_its_end_though_its_sender_has_closed(
    plan: Plan, senders: list[Any], pool: ThreadPoolExecutor
) -> None:
    publish(pool, senders, 1, 1)
    reading = ShmReceiver(plan, 0).receive(1, 60)
    next(reading)
    for sender in reversed(senders):
        sender.close()
    assert [name for name, tensor in reading if bool((tensor == 1).all())] == [*NAMES[1:]]


def test_where_stores_are_not_ordered_only_whole_versions_are_read(
    plan: Plan, senders: list[Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_receiver, "ORDERS_STORES", False)
    taps, sending = begin(pool, senders)
    reading = ShmReceiver(plan, 0).receive(1, 60)
    arriving = pool.submit(next, reading)
    for tap in taps:
        tap.let(3)
    time.sleep(0.1)
    assert not arriving.done()
    for tap in taps:
        tap.let(1)
    assert arriving.result()[0] == "a" and len(list(reading)) == 3
    for future in sending:
        future.result()


def test_a_late_rank_is_named_with_what_it_wrote(plan: Plan, senders: list[Any], pool: ThreadPoolExecutor) -> None:
    taps, sending = begin(pool, senders)
    for tap in taps[:-1]:
        tap.let(len(NAMES))
    taps[-1].let(1)
    reading = ShmReceiver(plan, 0).receive(1, 1)
    assert next(reading)[0] == "a"
    last = len(senders) - 1
    with pytest.raises(TransferFailed, match=rf"did not finish .*; trainer rank {last} wrote 1 of 4 pieces\)"):
        list(reading)
    taps[-1].let(3)
    for future in sending:
        future.result()


def stall(plan: Plan, rank: int, num_pieces: int) -> None:
    """Write some pieces of version 1 and then nothing more; the body of a child process."""
    tap = Tap(1)
    tap.let(num_pieces)
    shm_sender(plan, rank).send(1, tap, 600)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_half_way_ends_the_reading(lost: int, pool: ThreadPoolExecutor) -> None:
    plan = make_plan(2)
    child = multiprocessing.get_context("spawn").Process(target=stall, args=(plan, lost, 2), daemon=True)
    child.start()
    other = shm_sender(plan, 1 - lost)
    sending = pool.submit(other.send, 1, weights(1), 60)
    receiver = ShmReceiver(plan, 0)
    reading = receiver.receive(1, 60)
    held = [next(reading), next(reading)]
    arriving = pool.submit(list, reading)
    time.sleep(0.1)
    assert not arriving.done() and not sending.done()
    began = time.monotonic()
    child.kill()
    child.join()
    with pytest.raises(TransferFailed, match=f"trainer rank {lost} died"):
        sending.result()
    reason = f"trainer rank {lost} died" if lost else "the trainer's sender died before version 1"
    with pytest.raises(TransferFailed, match=reason):
        arriving.result()
    assert time.monotonic() - began < 20
    with pytest.raises(TransferFailed, match=f"trainer rank {lost} died"):
        other.send(1, weights(2), 60)
    assert all(bool((tensor == 1).all()) for _, tensor in held)
    other.close()
    receiver.close()
    assert not plan_folder(plan.uid).exists()


@given(cuts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=5), data=st.data())
def test_what_counts_as_whole_has_all_its_pieces(cuts: list[list[int]], data: st.DataObject) -> None:
    """`cuts`: for each tensor the ranks of its rows."""
    specs = tuple(TensorSpec(name=str(index), shape=(len(cut),), dtype="float32") for index, cut in enumerate(cuts))
    pieces = tuple(
        tuple(
            Piece(tensor=index, start=(row,), shape=(1,))
            for index, cut in enumerate(cuts)
            for row, owner in enumerate(cut)
            if owner == rank
        )
        for rank in range(3)
    )
    source = Layout(host="h", num_ranks=3, tensors=specs, pieces=pieces)
    form = Form(Plan(uid="x", source=source, targets=(Layout(host="h"),)))
    counts = [data.draw(st.integers(0, len(pieces[rank]))) for rank in form.ranks]
    whole = Progress(form, torch.tensor([*counts, 0], dtype=torch.int64).numpy()).num_whole()
    missing = [piece.tensor for rank, count in zip(form.ranks, counts, strict=True) for piece in pieces[rank][count:]]
    assert whole == min(missing, default=len(specs))
