"""What parity tests ask a trainer's ranks: the loss and every gradient, whole, before an optimizer touches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.algorithms.update.regions import regions
from areal.contracts.algorithm import Needs, TokenBatch
from areal.contracts.messages import Batch, Group
from areal.contracts.specs import BackendContext
from areal.contracts.transfer import Layout, piece_name
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options
from areal_fsdp2.shards import part_of


class Mixed:
    """A loss with a gradient for logprobs, unlike each other, and for entropies."""

    needs = Needs(advantage=True)

    def advantages(self, group: Group) -> list[float]:
        return [1.0] * len(group.trajectories)

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        entropy = batch.entropy.sum() / batch.total_tokens
        loss = -(logprobs * batch.advantages).sum() / batch.total_tokens - 0.3 * entropy
        return loss, {"entropy": entropy, "advantage_max": batch.advantages.max()}


class Probe:
    """One rank. Backends are never closed here, so that all cases share one process group."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._rendezvous = rendezvous

    def gradients(
        self, options: dict[str, Any], context: BackendContext, batch: Batch
    ) -> tuple[list[tuple[float, ...]], dict[str, float], dict[str, Any], float]:
        """Return logprobs, statistics, each gradient under its checkpoint's name (on rank 0), and the norm."""
        backend = self._backend(options, context)
        logprobs = backend.logprobs(batch)
        statistics = backend._passes.accumulate(batch, Mixed(), backend._optimizer)
        assert statistics is not None and backend._model is not None
        found = _whole([(n, p.grad) for n, p in backend._model.module.named_parameters() if p.grad is not None])
        norm, _ = backend._optimizer.step(1e-3)
        return logprobs, statistics, found if self._rank == 0 else {}, norm

    def pieces(self, options: dict[str, Any], context: BackendContext) -> tuple[Layout, dict[str, Any]]:
        """Return the layout, and what this rank would send of it, by the pieces' names."""
        backend = self._backend(options, context)
        layout, own = backend.layout(), backend._shards.own()
        names = [piece_name(layout.tensors[piece.tensor], piece) for piece in layout.pieces[self._rank]]
        return layout, {name: tensor.numpy().copy() for name, (_, tensor) in zip(names, own, strict=True)}

    def _backend(self, options: dict[str, Any], context: BackendContext) -> Fsdp2Backend:
        context = replace(context, rank=self._rank, rendezvous=self._rendezvous)
        backend = Fsdp2Backend(Fsdp2Options(**options), context)
        backend.start()
        return backend


def _whole(gradients: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return each gradient put together from all ranks' parts; parts that several ranks hold must be the same."""
    own = [
        (part.name, part.shape, part.box, part.view.numpy().copy())
        for name, gradient in gradients
        for region in regions(name, tuple(gradient.shape))
        if (part := part_of(region, gradient)) is not None
    ]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    found: dict[str, Any] = {}
    for name, shape, box, values in (held for parts in everybody for held in parts):
        whole = found.setdefault(name, torch.full(shape, torch.nan).numpy())
        known = whole[box]
        assert ((known == values) | (known != known)).all(), f"ranks hold different gradients of {name}"
        whole[box] = values
    return found
