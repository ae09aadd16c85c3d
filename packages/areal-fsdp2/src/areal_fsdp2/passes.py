"""Passes over a batch: each data rank computes its rows, and all ranks come to know what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal.algorithms.update.packing import Packed, pack
from areal.algorithms.update.statistics import combined
from areal.algorithms.update.tokens import by_rows, computed_totals, token_batch
from areal.contracts.algorithm import Loss
from areal.contracts.messages import Batch
from areal_fsdp2.balance import Hand, deal
from areal_fsdp2.mesh import Mesh
from areal_fsdp2.model import PackedModel
from areal_fsdp2.optimizer import Optimizer
from areal_fsdp2.pipeline import Pipeline, add_tied

Outcome = Callable[[int, Packed, Tensor, Tensor], Tensor]
"""From a micro-batch's number, tokens, numbers [N] and entropies [N] to its share of the loss, if there is one."""


class Passes:
    """Invariant: every rank makes the same number of passes through the model, and returns the same."""

    def __init__(self, model: PackedModel, mesh: Mesh, budget: int) -> None:
        """`budget`: most tokens of a micro-batch."""
        self._model = model
        self._mesh = mesh
        self._budget = budget
        self._pipeline: Pipeline | None = None
        if mesh.dimensions.pp > 1:
            # The residual stream is float32, whatever layers compute in.
            self._pipeline = Pipeline(mesh.group("pp"), mesh.device, model.config.hidden_size, torch.float32)

    @torch.no_grad()
    def numbers(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] the model's numbers of its trained tokens, 0 for the others."""
        hands = self._deal(batch)
        own: list[Tensor] = []

        def collect(number: int, packed: Packed, numbers: Tensor, entropy: Tensor) -> Tensor:
            own.append(numbers)
            return numbers

        self._go(batch, hands[self._mesh.data_rank], collect, None)
        _reshard(self._model)
        order = (i for dealt in hands for hand in dealt if not hand.is_dummy for i in hand.rows)
        return by_rows(batch, order, chain.from_iterable(self._everybodys(own, hands, batch)))

    def accumulate(self, batch: Batch, loss: Loss, optimizer: Optimizer) -> dict[str, float] | None:
        """Collect the gradient of a batch and return the statistics of all its rows; None without trained tokens."""
        hands = self._deal(batch)[self._mesh.data_rank]
        if not hands:
            return None
        totals = computed_totals(batch)
        shares: list[Mapping[str, Tensor]] = []

        def judge(number: int, packed: Packed, numbers: Tensor, entropy: Tensor) -> Tensor:
            if hands[number].is_dummy:
                return 0.0 * numbers.sum()
            value, named = loss.loss(numbers, token_batch(batch, packed, numbers.detach(), entropy, **totals))
            shares.append({"loss": value.detach(), **named})
            return value

        self._go(batch, hands, judge, optimizer)
        return combined(self._mesh.from_speakers(combined(shares)))

    def _go(self, batch: Batch, hands: list[Hand], outcome: Outcome, optimizer: Optimizer | None) -> None:
        """Take micro-batches through the model, and with an optimizer back; ranks exchange gradients with the last."""
        if self._pipeline is not None:
            self._through_stages(self._pipeline, batch, hands, outcome, optimizer)
            return
        for number, hand in enumerate(hands):
            packed = self._pack(batch, hand)
            if optimizer is not None:
                _set_sync(self._model, number == len(hands) - 1)
            value = outcome(number, packed, *self._model(packed, batch.temperature))
            if optimizer is not None:
                optimizer.backward(value)

    def _through_stages(
        self, pipeline: Pipeline, batch: Batch, hands: list[Hand], outcome: Outcome, optimizer: Optimizer | None
    ) -> None:
        packs = [self._pack(batch, hand) for hand in hands]

        def work(number: int, received: Tensor | None) -> Tensor:
            output = self._model(packs[number], batch.temperature, received)
            if not pipeline.is_last:
                return output
            value = outcome(number, packs[number], *output)
            return value if optimizer is None else optimizer.scaled(value)

        # Ranks along sp have a part of each sequence.
        lengths = [-(-len(packed.token_ids) // self._mesh.dimensions.sp) for packed in packs]
        if optimizer is None:
            pipeline.evaluate(lengths, work)
            return
        pipeline.train(lengths, work, lambda is_last: _set_sync(self._model, is_last))
        if self._model.has_tied_copy and self._model.embedding.requires_grad:
            add_tied(self._model.embedding, pipeline.group)

    def _everybodys(self, own: list[Tensor], hands: list[list[Hand]], batch: Batch) -> list[list[float]]:
        """Return for each data rank the numbers of its rows, hand after hand, without those of dummies."""
        real = [[hand for hand in dealt if not hand.is_dummy] for dealt in hands]
        sizes = [sum(batch.rows[i].num_loss_tokens for hand in dealt for i in hand.rows) for dealt in real]
        if not any(sizes):
            return [[] for _ in hands]
        mine = torch.zeros(max(sizes), device=self._mesh.device)
        if own:  # on a pipeline's last stage
            mine[: sizes[self._mesh.data_rank]] = torch.cat([mine[:0], *own[: len(real[self._mesh.data_rank])]])
        everybody = [torch.empty_like(mine) for _ in range(self._mesh.dimensions.world)]
        dist.all_gather(everybody, mine)
        speakers = self._mesh.dimensions.speakers()
        return [everybody[rank][:size].tolist() for rank, size in zip(speakers, sizes, strict=True)]

    def _deal(self, batch: Batch) -> list[list[Hand]]:
        ranks, stages = self._mesh.dimensions.dp, self._mesh.dimensions.pp
        return deal(batch.rows, self._budget, ranks, whole_groups=batch.whole_groups, num_stages=stages)

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
