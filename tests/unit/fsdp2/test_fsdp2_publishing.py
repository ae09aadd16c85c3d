"""What a rank does in a send that fails: the others may be gathering with it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.algorithms.update.sending import BackgroundSender
from areal.contracts.component import Component
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec, Transfer
from areal.errors import TransferFailed
from areal_fsdp2.publishing import Outgoing

SPEC = TensorSpec(name="a", shape=(2,), dtype="float32")
PIECES = tuple((Piece(tensor=0, start=(rank,), shape=(1,)),) for rank in range(2))


class Refusing:
    """A resharder whose sender reads one piece and gives up. Invariant: none of its sends arrives."""

    def __init__(self, options: Any, run_dir: str) -> None: ...

    def sender(self, plan: Plan, rank: int = 0) -> Refusing:
        return self

    def take(self, version: int, tensors: Iterator[Any], deadline_s: float) -> None:
        next(tensors)
        raise TransferFailed("no room")

    def send(self, version: int, tensors: Iterator[Any], deadline_s: float) -> None:
        self.take(version, tensors, deadline_s)

    def deliver(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("method", ["begin", "send"])
def test_what_the_others_take_part_in_is_gone_through_to_its_end(method: str) -> None:
    gathered: list[int] = []

    def own() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            gathered.append(number)  # where merging would gather on all ranks
            yield f"piece-{number}", torch.ones(1)

    shards: Any = SimpleNamespace(pieces=PIECES, own=own)
    plan = Plan(uid="p", source=Layout(host="here", num_ranks=2, tensors=(SPEC,), pieces=PIECES), targets=())
    resharder = Component(name="refusing", factory=f"{__name__}:Refusing")
    transfer = Transfer(phase="stage", version=1, resharder=resharder, options=None, plan=plan)
    outgoing = Outgoing(shards, 1, BackgroundSender(1))
    with pytest.raises(TransferFailed, match="no room"):
        getattr(outgoing, method)(transfer)
    assert gathered == [0, 1, 2]
