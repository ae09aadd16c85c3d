"""Deltas: exact whatever changed, and never against anything but what both sides hold."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.builtins.resharders.delta import ASK_AGAIN, TRIED, Choice, apply, encode
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec, checksum, piece_name
from areal.errors import TransferFailed

BLOCK = 65536
Weights = dict[str, torch.Tensor]
# Odd numbers of bytes, several blocks of words, several buckets, and no elements at all.
SPECS = (
    TensorSpec(name="wide", shape=(300, 700), dtype="bfloat16"),
    TensorSpec(name="bytes", shape=(17,), dtype="uint8"),
    TensorSpec(name="empty", shape=(0, 3), dtype="bfloat16"),
    TensorSpec(name="exact", shape=(40, 5), dtype="int64"),
    TensorSpec(name="scalar", shape=(), dtype="bfloat16"),
)
PIECES = (
    (
        Piece(tensor=0, start=(0, 0), shape=(123, 700)),
        Piece(tensor=1, start=(0,), shape=(17,)),
        Piece(tensor=2, start=(0, 0), shape=(0, 3)),
        Piece(tensor=3, start=(0, 0), shape=(40, 2)),
    ),
    (
        Piece(tensor=0, start=(123, 0), shape=(177, 700)),
        Piece(tensor=3, start=(0, 2), shape=(40, 3)),
        Piece(tensor=4, start=(), shape=()),
    ),
)
NUM_BYTES = 300 * 700 * 2 + 17 + 40 * 5 * 8 + 2


@settings(deadline=None, max_examples=60)
@given(
    size=st.one_of(st.integers(0, 40), st.integers(2 * BLOCK - 3, 2 * BLOCK + 3), st.just(6 * BLOCK + 1)),
    share=st.sampled_from([0.0, 1e-4, 0.01, 0.2, 0.49, 0.6, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_a_delta_makes_is_equal_bit_by_bit(size: int, share: float, seed: int) -> None:
    chance = np.random.default_rng(seed)
    old = chance.integers(0, 256, size, dtype=np.uint8)
    new = np.where(chance.random(size) < share, chance.integers(0, 256, size, dtype=np.uint8), old)
    delta = encode(old, new)
    if delta is None:
        assert size < 32 or (old != new).mean() > 0.1, "a small change is worth a delta"
        return
    assert len(delta) < size
    apply(old, delta)
    assert (old == new).all()


def test_bits_count_and_not_numbers() -> None:
    """A NaN is unequal to itself, and 0 equals -0."""
    old = torch.tensor([float("nan"), 0.0, 1.0, *[2.0] * 20], dtype=torch.bfloat16).view(torch.uint8).numpy()
    new = torch.tensor([float("nan"), -0.0, 1.0, *[2.0] * 20], dtype=torch.bfloat16).view(torch.uint8).numpy()
    delta = encode(old, new)
    assert delta is not None and len(delta) == 8 + 2 + 1
    apply(old, delta)
    assert (old == new).all()


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ([], 0),
        ([0, 1, 255, 510, 511], 5 * 2 + 5 + 1),  # neighbours in bytes; 1 to 255 is 254, 255 to 510 needs two
        ([0, BLOCK, 4 * BLOCK - 1], 3 * 2 + 2 * (1 + 2 + 4)),  # far apart in words
    ],
)
def test_a_changed_word_costs_three_or_four_bytes(words: list[int], size: int) -> None:
    old, new = (np.zeros(8 * BLOCK, dtype=np.uint8) for _ in range(2))
    new.view(np.uint16)[words] = 1
    delta = encode(old, new)
    assert delta is not None and len(delta) == 8 + size
    apply(old, delta)
    assert (old == new).all()


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "another place"])
def test_a_delta_that_does_not_fit_is_refused(damage: str) -> None:
    old, new = np.zeros(1000, dtype=np.uint8), np.zeros(1000, dtype=np.uint8)
    new[10] = 1
    made = encode(old, new)
    assert made is not None
    wrong = {"cut": made[:-1], "longer": np.append(made, made), "empty": made[:0]}.get(damage)
    if wrong is None:
        wrong = made.copy()
        wrong[10] = 255
    with pytest.raises(TransferFailed, match="a delta"):
        apply(old, wrong)
    assert not old.any()


class TestChoice:
    def test_it_is_made_by_the_clock(self) -> None:
        choice = Choice("auto")
        assert not choice.wants(), "nothing is known, and the first transfer is whole anyway"
        choice.took(1000, 1.0, tried=False)
        assert choice.wants() and choice.tries()
        for _ in range(TRIED):
            choice.took(1000, 0.1, tried=True)
        assert choice.wants() and choice.tries()
        for _ in range(8):
            choice.took(1000, 3.0, tried=True)
        assert not choice.wants() and not choice.tries()

    def test_a_no_is_asked_again_after_some_transfers(self) -> None:
        choice = Choice("auto")
        choice.took(1, 1.0, tried=False)
        for _ in range(TRIED):
            choice.took(1, 9.0, tried=True)
        assert [choice.wants() for _ in range(ASK_AGAIN)] == [False] * (ASK_AGAIN - 1) + [True]

    @pytest.mark.parametrize(("mode", "answer"), [("never", False), ("always", True)])
    def test_an_order_is_obeyed(self, mode: Literal["never", "always"], answer: bool) -> None:
        choice = Choice(mode)
        choice.took(1, 1.0, tried=False)
        choice.took(1, 9.0 if answer else 0.1, tried=True)
        assert choice.wants() is answer


class Road:
    """A plan of two trainer ranks and some engines, all in threads. Invariant: each half lives as in a run."""

    def __init__(self, num_engines: int = 2, *, anchor_every: int = 32, delta: str = "always") -> None:
        options = XcclOptions.model_validate(
            {"shared_memory": "never", "bucket_bytes": 100_001, "delta": delta, "anchor_every": anchor_every}
        )
        self._resharder = XcclResharder(options, "")
        self._pool = ThreadPoolExecutor(2 + num_engines)
        self._options = options
        self._num_engines = num_engines
        self.plan: Plan
        self.begin_anew()

    def begin_anew(self, num_engines: int | None = None) -> None:
        """Another trainer, or another set of engines: a new plan, as the publisher makes it."""
        self.close()
        self._num_engines = num_engines or self._num_engines
        source = Layout(host="one", tensors=SPECS, pieces=PIECES, num_ranks=2, dtype="bfloat16")
        self.plan = self._resharder.plan(source, [Layout(host="one", dtype="bfloat16")] * self._num_engines)
        self.senders = [self._resharder.sender(self.plan, rank) for rank in (0, 1)]
        self.receivers = [self._resharder.receiver(self.plan, index) for index in range(self._num_engines)]

    def replace_receiver(self, index: int) -> None:
        self.receivers[index].close()
        self.receivers[index] = self._resharder.receiver(self.plan, index)

    def replace_sender(self, rank: int) -> None:
        self.senders[rank].close()
        self.senders[rank] = self._resharder.sender(self.plan, rank)

    def publish(self, version: int, weights: Weights) -> int:
        """Send a version, compare what arrived bit by bit, and return the bytes that were sent to each engine."""
        arriving = [self._pool.submit(lambda each: dict(each.receive(version, 30)), each) for each in self.receivers]
        sending = [
            self._pool.submit(sender.send, version, self._pieces(weights, rank), 30)
            for rank, sender in enumerate(self.senders)
        ]
        receipts = [future.result() for future in sending]
        checksums = {name: crc for receipt in receipts for name, crc in receipt.checksums.items()}
        for future in arriving:
            arrived = future.result()
            assert arrived.keys() == weights.keys()
            assert all(checksum(arrived[name]) == checksum(weights[name]) for name in weights)
        assert checksums == {
            piece_name(SPECS[piece.tensor], piece): checksum(weights[SPECS[piece.tensor].name][piece.box])
            for pieces in PIECES
            for piece in pieces
        }
        return sum(receipt.num_bytes for receipt in receipts)

    def interrupt(self, version: int, weights: Weights, rank: int) -> None:
        """Begin to send a version and have one rank's source break in the middle of it."""

        def breaking() -> Iterator[tuple[str, torch.Tensor]]:
            yield next(iter(self._pieces(weights, rank)))
            raise RuntimeError("the source broke")

        arriving = [self._pool.submit(lambda each: list(each.receive(version, 30)), each) for each in self.receivers]
        sending = [
            self._pool.submit(sender.send, version, breaking() if at == rank else self._pieces(weights, at), 30)
            for at, sender in enumerate(self.senders)
        ]
        for future in (*sending, *arriving):
            with pytest.raises(TransferFailed):
                future.result()

    def close(self) -> None:
        with suppress(AttributeError):
            for half in (*self.senders, *self.receivers):
                half.close()

    def _pieces(self, weights: Weights, rank: int) -> list[tuple[str, torch.Tensor]]:
        return [(SPECS[piece.tensor].name, weights[SPECS[piece.tensor].name][piece.box]) for piece in PIECES[rank]]


def first_weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randint(0, 250, spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in SPECS
    }


def changed(weights: Weights, seed: int, share: float = 0.004) -> Weights:
    """Return a copy in which about that share of the numbers is another."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor.neg(), tensor)
        for name, tensor in weights.items()
    }


@pytest.fixture
def road() -> Iterator[Any]:
    made: list[Road] = []

    def make(**options: Any) -> Road:
        made.append(Road(**options))
        return made[-1]

    yield make
    for each in made * 2:
        each.close()


def test_the_first_version_is_whole_and_the_next_ones_are_small(road: Any) -> None:
    one, weights = road(), first_weights()
    assert one.publish(1, weights) == NUM_BYTES
    for version in (2, 3, 4):
        weights = changed(weights, version)
        assert one.publish(version, weights) < NUM_BYTES / 20
    assert one.publish(5, weights) < 200, "nothing changed: block counts and headers only"


def test_a_bucket_of_which_nearly_everything_changed_goes_whole(road: Any) -> None:
    one, weights = road(), first_weights()
    one.publish(1, weights)
    assert NUM_BYTES < one.publish(2, changed(weights, 2, share=1.0)) < NUM_BYTES + 200


def test_an_anchor_comes_whole_every_so_many_versions(road: Any) -> None:
    one, weights, sizes = road(anchor_every=3), first_weights(), []
    for version in range(1, 8):
        weights = changed(weights, version)
        sizes.append(one.publish(version, weights) == NUM_BYTES)
    assert sizes == [True, False, False, True, False, False, True]


def test_a_version_that_was_taken_back_and_made_again_is_no_trap(road: Any) -> None:
    one, weights = road(), first_weights()
    one.publish(1, weights)
    one.publish(2, changed(weights, 2))  # no engine committed it, and the trainer went back to version 1
    assert one.publish(2, changed(weights, 3)) < NUM_BYTES / 20
    assert one.publish(1, weights) < NUM_BYTES / 20


def test_an_engine_that_joins_or_is_replaced_gets_everything(road: Any) -> None:
    one, weights = road(), first_weights()
    one.publish(1, weights)
    one.replace_receiver(1)  # the same plan, a receiver that holds nothing
    weights = changed(weights, 2)
    assert one.publish(2, weights) == NUM_BYTES
    assert one.publish(3, changed(weights, 3)) < NUM_BYTES / 20
    one.begin_anew(num_engines=1)
    assert one.publish(4, weights) == NUM_BYTES


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_begins_anew_sends_everything(road: Any, rank: int) -> None:
    one, weights = road(), first_weights()
    one.publish(1, weights)
    one.replace_sender(rank)
    assert one.publish(2, changed(weights, 2)) == NUM_BYTES


@pytest.mark.parametrize("rank", [0, 1])
def test_after_an_interruption_everything_comes_again(road: Any, rank: int) -> None:
    one, weights = road(), first_weights()
    one.publish(1, weights)
    one.interrupt(2, changed(weights, 2, share=0.1), rank)
    weights = changed(weights, 3)
    assert one.publish(2, weights) == NUM_BYTES
    assert one.publish(3, changed(weights, 4)) < NUM_BYTES / 20


def test_what_was_received_is_the_consumers_own(road: Any) -> None:
    one, weights = road(num_engines=1), first_weights()
    one.publish(1, weights)
    with ThreadPoolExecutor() as pool:
        sending = [pool.submit(s.send, 2, one._pieces(weights, rank), 30) for rank, s in enumerate(one.senders)]
        for _, tensor in one.receivers[0].receive(2, 30):
            tensor.zero_()
        for future in sending:
            future.result()
    weights = changed(weights, 3)
    assert one.publish(3, weights) < NUM_BYTES / 20, "and the base is as it was sent"


def test_float32_is_exact_though_its_lower_halves_all_change() -> None:
    options = XcclOptions(shared_memory="never", delta="always")
    spec = TensorSpec(name="w", shape=(1000,), dtype="float32")
    resharder = XcclResharder(options, "")
    plan = resharder.plan(Layout(host="one", tensors=(spec,)), [Layout(host="one", dtype="float32")])
    sender, receiver = resharder.sender(plan), resharder.receiver(plan, 0)
    values = torch.randn(1000)
    with ThreadPoolExecutor() as pool:
        for version in (1, 2):
            sent = values + 1e-6 * version
            arriving = pool.submit(lambda version: dict(receiver.receive(version, 30)), version)
            receipt = sender.send(version, [("w", sent)], 30)
            assert torch.equal(arriving.result()["w"], sent)
            assert 0.7 * sent.nbytes < receipt.num_bytes <= sent.nbytes
    sender.close()
    receiver.close()


STEPS = st.lists(
    st.sampled_from(["publish", "publish", "publish", "big", "again", "interrupt", "receiver", "sender", "anew"]),
    min_size=3,
    max_size=9,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, anchor_every=st.sampled_from([2, 3, 32]), delta=st.sampled_from(["always", "auto"]))
def test_whatever_happens_in_between_the_weights_are_exact(steps: list[str], anchor_every: int, delta: str) -> None:
    one, weights = Road(num_engines=2, anchor_every=anchor_every, delta=delta), first_weights()
    try:
        version = 0
        for number, step in enumerate(["publish", *steps, "publish"]):
            if step == "interrupt":
                one.interrupt(version + 1, changed(weights, 100 + number, share=0.1), number % 2)
                one.begin_anew() if number % 3 == 0 else None
                continue
            if step == "receiver":
                one.replace_receiver(number % 2)
            elif step == "sender":
                one.replace_sender(number % 2)
            elif step == "anew":
                one.begin_anew()
            version += step != "again"
            weights = changed(weights, number, share=0.7 if step == "big" else 0.004)
            one.publish(version, weights)
    finally:
        one.close()
