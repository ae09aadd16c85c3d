"""Passes over a batch: each data rank computes its rows, and all ranks come to know what came out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal.algorithms.update.packing import Packed, pack
from areal.algorithms.update.statistics import combined
from areal.algorithms.update.tokens import token_batch
from areal.contracts.algorithm import Loss
from areal.contracts.messages import Batch
from areal_fsdp2.balance import Hand, deal
from areal_fsdp2.mesh import Mesh
from areal_fsdp2.model import PackedModel
from areal_fsdp2.optimizer import Optimizer


class Passes:
    """Invariant: every rank makes the same number of passes through the model, and returns the same."""

    def __init__(self, model: PackedModel, mesh: Mesh, budget: int) -> None:
        """`budget`: most tokens of a micro-batch."""
        self._model = model
        self._mesh = mesh
        self._budget = budget

    @torch.no_grad()
    def numbers(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] the model's numbers of its trained tokens, 0 for the others."""
        hands = self._deal(batch)
        own = [self._forward(self._pack(batch, hand), batch)[0] for hand in hands[self._mesh.data_rank]]
        _reshard(self._model)
        found = [[0.0] * len(row.token_ids) for row in batch.rows]
        for dealt, told in zip(hands, self._everybodys(own, hands, batch), strict=True):
            stream = iter(told)
            for i in (i for hand in dealt if not hand.is_dummy for i in hand.rows):
                for t, is_trained in enumerate(batch.rows[i].loss_mask):
                    if is_trained:
                        found[i][t] = next(stream)
        return [tuple(row) for row in found]

    def accumulate(self, batch: Batch, loss: Loss, optimizer: Optimizer) -> dict[str, float] | None:
        """Collect the gradient of a batch and return the statistics of all its rows; None without trained tokens."""
        hands = self._deal(batch)[self._mesh.data_rank]
        if not hands:
            return None
        shares = list(self._shares(batch, loss, optimizer, hands))
        return combined(self._mesh.from_speakers(combined(shares)))

    def _shares(
        self, batch: Batch, loss: Loss, optimizer: Optimizer, hands: list[Hand]
    ) -> Iterator[Mapping[str, Tensor]]:
        """Add the gradients of this rank's micro-batches; ranks exchange them with the last one."""
        totals = {
            "computed_tokens": sum(row.num_loss_tokens for row in batch.rows),
            "computed_groups": len({row.group for row in batch.rows}),
        }
        for number, hand in enumerate(hands):
            _set_sync(self._model, number == len(hands) - 1)
            packed = self._pack(batch, hand)
            numbers, entropy = self._forward(packed, batch)
            if hand.is_dummy:
                optimizer.backward(0.0 * numbers.sum())
                continue
            value, named = loss.loss(numbers, token_batch(batch, packed, numbers.detach(), entropy, **totals))
            optimizer.backward(value)
            yield {"loss": value, **named}

    def _forward(self, packed: Packed, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._model(packed, batch.temperature)

    def _everybodys(self, own: list[Tensor], hands: list[list[Hand]], batch: Batch) -> list[list[float]]:
        """Return for each data rank the numbers of its rows, hand after hand, without those of dummies."""
        real = [[hand for hand in dealt if not hand.is_dummy] for dealt in hands]
        sizes = [sum(batch.rows[i].num_loss_tokens for hand in dealt for i in hand.rows) for dealt in real]
        if not any(sizes):
            return [[] for _ in hands]
        mine = torch.zeros(max(sizes), device=self._mesh.device)
        mine[: sizes[self._mesh.data_rank]] = torch.cat([mine[:0], *own[: len(real[self._mesh.data_rank])]])
        everybody = [torch.empty_like(mine) for _ in range(self._mesh.dimensions.world)]
        dist.all_gather(everybody, mine)
        speakers = self._mesh.dimensions.speakers()
        return [everybody[rank][:size].tolist() for rank, size in zip(speakers, sizes, strict=True)]

    def _deal(self, batch: Batch) -> list[list[Hand]]:
        return deal(batch.rows, self._budget, self._mesh.dimensions.dp, whole_groups=batch.whole_groups)

    def _pack(self, batch: Batch, hand: Hand) -> Packed:
        return pack(batch.rows, hand.rows, self._mesh.device)


def _set_sync(model: PackedModel, is_last: bool) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)


def _reshard(model: PackedModel) -> None:
    """Free the root's whole weights, which FSDP keeps after a forward pass for a backward pass."""
    assert isinstance(model, FSDPModule)
    model.reshard()
