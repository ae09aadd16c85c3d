"""Weights that change while they are on their way: what arrives is what was there at the beginning."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from areal.algorithms.update.sending import BackgroundSender
from areal.contracts.component import Component
from areal.contracts.transfer import Layout, Plan, Receipt, Transfer
from areal.errors import TransferFailed

MADE: list[Plain] = []
Tensors = Iterable[tuple[str, torch.Tensor]]


class Plain:
    """A resharder and its sender, which sends in one go.

    Invariant: `log` is what it was asked, in order, and `sent` the last version's tensors as they are now.
    """

    sent: dict[str, torch.Tensor]
    may_end = threading.Event()

    def __init__(self, options: Any = None, run_dir: str = "") -> None:
        MADE.append(self)
        self.log: list[str] = []

    def sender(self, plan: Plan, rank: int = 0) -> Plain:
        return self

    def close(self) -> None:
        self.log.append("close")

    def send(self, version: int, tensors: Tensors, deadline_s: float) -> Receipt:
        self.sent = dict(tensors)
        self.log.append(f"send {version}")
        assert self.may_end.wait(10)
        return Receipt(version=version, checksums={})

    def interrupt(self) -> None:
        self.log.append("interrupt")
        self.may_end.set()


class InHalves(Plain):
    """Has memory of its own. Invariant: as above."""

    def take(self, version: int, tensors: Tensors, deadline_s: float) -> None:
        self.log.append(f"take {version}")
        self.sent = {name: tensor.clone() for name, tensor in tensors}

    def deliver(self) -> Receipt:
        self.log.append("deliver")
        return Receipt(version=0, checksums={})


def transfer(uid: str, version: int = 1, kind: str = "Plain", dtypes: tuple[str, ...] = ()) -> Transfer:
    targets = tuple(Layout(host="here", dtype=dtype) for dtype in dtypes)
    plan = Plan(uid=uid, source=Layout(host="here"), targets=targets)
    resharder = Component(name="noted", factory=f"{__name__}:{kind}")
    return Transfer(phase="stage", version=version, resharder=resharder, options=None, plan=plan)


def sender_of(kept: BackgroundSender, transfer: Transfer) -> Any:
    return kept._kept.of(transfer)


@pytest.mark.parametrize(("dtypes", "dtype"), [(("bfloat16",) * 2, torch.bfloat16), (("bfloat16", "float16"), None)])
@pytest.mark.parametrize("kind", ["Plain", "InHalves"])
def test_what_was_taken_is_delivered_whatever_happens_to_it_meanwhile(
    kind: str, dtypes: tuple[str, ...], dtype: torch.dtype | None
) -> None:
    Plain.may_end.set()
    kept, weights = BackgroundSender(), {"a": torch.tensor([1.0, 2.5]), "b": torch.tensor([[3.0]])}
    for version in (1, 2):
        now = {name: tensor.clone() for name, tensor in weights.items()}
        kept.take(transfer("p", version, kind, dtypes), weights.items())
        for tensor in weights.values():
            tensor += 1
        assert kept.deliver().version in (0, version)
        sender = sender_of(kept, transfer("p", version, kind, dtypes))
        assert {name: tensor.float().tolist() for name, tensor in sender.sent.items()} == {
            name: tensor.tolist() for name, tensor in now.items()
        }
        if kind == "Plain":
            assert {tensor.dtype for tensor in sender.sent.values()} == {dtype or torch.float32}
    wanted = ["send 1", "send 2"] if kind == "Plain" else ["take 1", "deliver", "take 2", "deliver"]
    assert sender.log == wanted


def test_whole_numbers_travel_as_they_are() -> None:
    Plain.may_end.set()
    kept, numbers = BackgroundSender(), torch.tensor([257, 123456789])
    kept.take(transfer("p", 1, dtypes=("bfloat16",)), {"buffer": numbers}.items())
    kept.deliver()
    assert sender_of(kept, transfer("p", 1)).sent["buffer"].tolist() == [257, 123456789]


def test_the_copies_memory_is_used_again() -> None:
    Plain.may_end.set()
    kept, addresses = BackgroundSender(), set[int]()
    for version in (1, 2):
        kept.take(transfer("p", version, dtypes=("float32",)), {"a": torch.ones(8)}.items())
        kept.deliver()
        addresses.add(sender_of(kept, transfer("p", version)).sent["a"].data_ptr())
    assert len(addresses) == 1
    kept.take(transfer("p", 3, dtypes=("float32",)), {"a": torch.ones(9)}.items())
    kept.deliver()
    assert sender_of(kept, transfer("p", 3)).sent["a"].shape == (9,)


def test_a_delivery_without_something_taken_is_refused() -> None:
    Plain.may_end.set()
    kept = BackgroundSender()
    with pytest.raises(TransferFailed, match="had not begun"):
        kept.deliver()
    kept.take(transfer("p", 1), ())
    kept.deliver()
    with pytest.raises(TransferFailed, match="had not begun"):
        kept.deliver()


def test_closing_ends_a_delivery_first() -> None:
    MADE.clear()
    Plain.may_end.clear()
    kept = BackgroundSender()
    kept.take(transfer("p", 1), ())
    delivering = threading.Thread(target=kept.deliver)
    delivering.start()
    while not MADE[0].log:
        pass
    kept.close()
    delivering.join(10)
    assert MADE[0].log == ["send 1", "interrupt", "close"] and not delivering.is_alive()
