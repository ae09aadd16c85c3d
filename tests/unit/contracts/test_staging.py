"""Staging: one receiver at a time, deadlines, tied parameters, copies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from areal.builtins.transformers_engine.model import commit
from areal.contracts import staging as module
from areal.contracts.component import Component
from areal.contracts.staging import Staging
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec, Transfer, checksum
from areal.errors import TransferFailed


class Scripted:
    """A resharder and receiver whose behaviour a test sets. Invariant: remembers every receiver it made."""

    script: ClassVar[Any]
    opened: ClassVar[list[Scripted]]

    def __init__(self, options: Any, run_dir: str) -> None:
        self.closed = threading.Event()

    def receiver(self, plan: Plan, member: int) -> Scripted:
        self.opened.append(self)
        return self

    def receive(self, version: int, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        return self.script(self, version, deadline_s)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def fresh() -> None:
    Scripted.opened = []
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(tensors(version).items()))


def tensors(version: int) -> dict[str, Tensor]:
    return {"a": torch.full((2, 3), float(version)), "b": torch.full((4,), float(version))}


def parameters() -> dict[str, Tensor]:
    shared = torch.zeros(2, 3)
    return {"a": shared, "b": torch.zeros(4), "tied_a": shared}


def transfer(version: int = 1, uid: str = "plan", deadline_s: float = 5.0) -> Transfer:
    layout = Layout(host="here")
    return Transfer(
        phase="stage",
        version=version,
        resharder=Component(name="scripted", factory=f"{__name__}:Scripted"),
        options=None,
        plan=Plan(uid=uid, source=layout, targets=(layout,)),
        deadline_s=deadline_s,
    )


@pytest.fixture
def component_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is not importable by name under every import mode; hand the class out directly."""
    monkeypatch.setattr(Component, "load", lambda self: Scripted)


pytestmark = pytest.mark.usefixtures("component_path")


async def test_what_is_staged_is_a_checked_copy() -> None:
    memory = tensors(1)
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(memory.items()))
    held = parameters()
    staging = Staging("engine-0", held)
    receipt = await staging.stage(transfer())
    assert receipt.checksums == {name: checksum(tensor) for name, tensor in memory.items()}
    assert receipt.num_bytes == 40
    memory["a"].fill_(77)
    assert held["a"].sum() == 0, "the running weights are untouched until the commit"
    staged = staging.take(1)
    commit(held, staged)
    assert torch.equal(held["tied_a"], torch.ones(2, 3))
    with pytest.raises(TransferFailed, match="nothing is staged"):
        staging.take(1)


async def test_what_lasts_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "lasting", True, raising=False)
    memory = tensors(1)
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(memory.items()))
    staging = Staging("engine-0", parameters())
    receipt = await staging.stage(transfer())
    assert receipt.checksums == {name: checksum(tensor) for name, tensor in memory.items()}
    staged = staging.take(1)
    assert [staged[name].data_ptr() for name in memory] == [tensor.data_ptr() for tensor in memory.values()]


async def test_checksums_are_those_of_the_pieces_that_were_sent() -> None:
    specs = (
        TensorSpec(name="a", shape=(2, 3), dtype="float32"),
        TensorSpec(name="b", shape=(4,), dtype="float32"),
    )
    cut = (
        (Piece(tensor=0, start=(0, 0), shape=(2, 1)),),
        (Piece(tensor=0, start=(0, 1), shape=(2, 2)), Piece(tensor=1, start=(0,), shape=(4,))),
    )
    sent = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)}
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(sent.items()))
    source = Layout(host="here", tensors=specs, num_ranks=2, pieces=cut)
    whole = transfer()
    receipt = await Staging("engine-0", parameters()).stage(replace(whole, plan=replace(whole.plan, source=source)))
    assert receipt.checksums == {
        "a[0:2,0:1]": checksum(sent["a"][:, :1]),
        "a[0:2,1:3]": checksum(sent["a"][:, 1:]),
        "b": checksum(sent["b"]),
    }
    assert receipt.num_bytes == 40


@pytest.mark.parametrize("name", ["a", "tied_a"])
async def test_a_tied_parameter_may_come_under_either_name(name: str) -> None:
    sent = {name: torch.full((2, 3), 4.0), "b": torch.zeros(4)}
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(sent.items()))
    held = parameters()
    staging = Staging("engine-0", held)
    receipt = await staging.stage(transfer())
    assert set(receipt.checksums) == {name, "b"}
    commit(held, staging.take(1))
    assert held["a"].mean() == 4.0


async def test_a_tied_parameter_cannot_get_two_values() -> None:
    sent = {**tensors(1), "tied_a": torch.zeros(2, 3)}
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(sent.items()))
    with pytest.raises(TransferFailed, match="'a' and 'tied_a' are one tied parameter"):
        await Staging("engine-0", parameters()).stage(transfer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "without 'b'"),
        ({"c": torch.zeros(1)}, "no parameter 'c'"),
        ({"b": torch.zeros(5)}, r"'b' arrived as \[5\], engine 'engine-0' holds \[4\]"),
        ({"b": torch.zeros(4).half()}, r"'b' arrived as torch.float16, engine 'engine-0' holds torch.float32"),
    ],
)
async def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    sent = {name: tensor for name, tensor in {**tensors(1), **change}.items() if tensor is not None}
    Scripted.script = staticmethod(lambda receiver, version, deadline_s: iter(sent.items()))
    staging = Staging("engine-0", parameters())
    with pytest.raises(TransferFailed, match=message):
        await staging.stage(transfer())
    with pytest.raises(TransferFailed, match="nothing is staged"):
        staging.take(1)


async def test_any_error_of_a_receiver_is_a_failed_transfer() -> None:
    def broken(receiver: Scripted, version: int, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2, 3)
        raise OSError("the cable is cut")

    Scripted.script = staticmethod(broken)
    with pytest.raises(TransferFailed, match="could not receive version 1: OSError: the cable is cut"):
        await Staging("engine-0", parameters()).stage(transfer())


async def test_one_receiver_serves_a_plan_and_another_plan_closes_it() -> None:
    staging = Staging("engine-0", parameters())
    for version in (1, 2, 3):
        await staging.stage(transfer(version))
    assert len(Scripted.opened) == 1
    await staging.stage(transfer(4, uid="other"))
    assert [receiver.closed.is_set() for receiver in Scripted.opened] == [True, False]
    staging.close()
    staging.close()
    assert Scripted.opened[1].closed.is_set()


async def test_a_receiver_that_ignores_its_deadline_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(receiver: Scripted, version: int, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        receiver.closed.wait(20)
        yield "a", torch.zeros(2, 3)

    Scripted.script = staticmethod(stuck)
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    staging = Staging("engine-0", parameters())
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"'engine-0' did not receive version 1 within 0.2 s"):
        await staging.stage(transfer(deadline_s=0.2))
    assert time.monotonic() - started < 10
    assert Scripted.opened[0].closed.is_set(), "closing is what sets the stuck thread free"


async def test_a_slow_receiver_is_given_up_between_tensors() -> None:
    def slow(receiver: Scripted, version: int, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        for item in tensors(version).items():
            time.sleep(0.2)
            yield item

    Scripted.script = staticmethod(slow)
    with pytest.raises(TransferFailed, match="gave up version 1"):
        await Staging("engine-0", parameters()).stage(transfer(deadline_s=0.1))


async def test_a_rollback_during_the_stage_wins() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def waiting(receiver: Scripted, version: int, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        begun.set()
        go_on.wait(20)
        yield from tensors(version).items()

    Scripted.script = staticmethod(waiting)
    staging = Staging("engine-0", parameters())
    task = asyncio.ensure_future(staging.stage(transfer()))
    await asyncio.to_thread(begun.wait, 20)
    staging.drop()
    go_on.set()
    with pytest.raises(TransferFailed):
        await task
    with pytest.raises(TransferFailed, match="nothing is staged"):
        staging.take(1)


async def test_a_new_stage_waits_for_an_abandoned_one() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def waiting(receiver: Scripted, version: int, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        if version == 1:
            begun.set()
            go_on.wait(20)
        yield from tensors(version).items()

    Scripted.script = staticmethod(waiting)
    staging = Staging("engine-0", parameters())
    abandoned = asyncio.ensure_future(staging.stage(transfer(1)))
    await asyncio.to_thread(begun.wait, 20)
    abandoned.cancel()
    await asyncio.wait([abandoned])
    with pytest.raises(TransferFailed, match="still busy"):
        await staging.stage(transfer(2, deadline_s=0.1))
    go_on.set()
    await staging.stage(transfer(3))
    assert float(staging.take(3)["b"][0]) == 3.0
