"""Collectives with a gradient. All ranks of a group compute the same loss from the same numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copied(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what is the same on all ranks, for each to do another part of the work; their gradients are added."""
    return _Copy.apply(states, group)


def summed(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of what the ranks have; each part gets the gradient of the sum, which is the same on all ranks."""
    return _Sum.apply(parts, group)


def exchanged(states: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Cut along one dimension, one piece for each rank, and join what comes along another; gradients go back."""
    return _Exchange.apply(states, cut, join, group)


class _Copy(torch.autograd.Function):
    """Invariant: the backward pass is `summed`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Invariant: the backward pass leaves gradients as they are."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = parts.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Exchange(torch.autograd.Function):
    """All-to-all. Invariant: the backward pass is the way back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = (join, cut, group)
        outgoing = torch.stack(states.chunk(group.size(), cut))
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        return torch.cat(incoming.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], *ctx.way_back), None, None, None
