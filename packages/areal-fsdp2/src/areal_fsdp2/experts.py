"""Expert parallelism: the experts of a layer lie on several ranks, and tokens or sums travel between them.

transformers has both exchanges too (``DistributedConfig(ep_size=...)``, class ``EPImplementation``), and they train.
They are not used: in 5.24 it makes its own mesh from the whole world while it loads the weights, and refuses token
dispatch and sharded data parallelism beside a pipeline; of the switches that 5.23 had, ``tp_plan`` and
``enable_expert_parallel`` are already announced as removed. What is used is the door beside it that such classes go
through, ``ALL_EXPERTS_FUNCTIONS``: a function that the model's configuration names, as it does for attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from areal.errors import WorkerFailed

NAME = "areal_spread"
"""What the models' configurations call this way to compute the experts."""
WEIGHTS = ("gate_up_proj", "down_proj")
"""The stacked weights of all experts of a layer: [E, 2 I, H], gate above up, and [E, H, I]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """How the experts of one layer are shared out.

    Invariant: rank r of the group has the experts r n .. r n + n - 1, with n = `num_local`.
    """

    group: dist.ProcessGroup
    num_local: int
    replicated: bool
    """All ranks of the group have the same tokens; otherwise each has its own."""


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that hold stacked experts, in the order of the layers."""
    return [part for part in module.modules() if all(_is_stacked(part, name) for name in WEIGHTS)]


def spread_experts(module: PreTrainedModel, mesh: DeviceMesh, *, replicated: bool) -> list[nn.Module]:
    """Leave to each rank of the 1-D `mesh` its share of each layer's experts, and return the parts that hold them.

    Their parameters, on the meta device or not, become DTensors with placement Shard(0). With `replicated` (the ranks
    are tensor-parallel ones with equal hidden states) each rank computes its own experts for all tokens and the
    results are summed; otherwise (data-parallel ranks) copies of the tokens travel to their experts and the results
    back. All ranks must make the same passes, even with zero tokens. The gradient of a weight is the sum over the
    tokens of all ranks of the mesh, and is not to be averaged over them; gradients of everything else, the router's
    too, are those of the rank's own tokens.

    The auxiliary loss that some models balance their router with is a product of two means over a batch, so that it
    would depend on the packing: it is never added, and a model whose configuration asks for it is refused, as is one
    whose experts have biases or another layout, or cannot be shared out evenly. WorkerFailed.
    """
    layers = expert_layers(module)
    _check(module, layers, mesh.size())
    for experts in layers:
        num_local = experts.get_parameter(WEIGHTS[0]).shape[0] // mesh.size()
        mine = slice(mesh.get_local_rank() * num_local, (mesh.get_local_rank() + 1) * num_local)
        for name in WEIGHTS:
            whole = experts.get_parameter(name)
            part = DTensor.from_local(whole.detach()[mine].clone(), mesh, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        experts.spread = Spread(group=mesh.get_group(), num_local=num_local, replicated=replicated)  # type: ignore
    module.set_experts_implementation(NAME)
    return layers


def _is_stacked(part: nn.Module, name: str) -> bool:
    weight = getattr(part, name, None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 3


def _check(module: PreTrainedModel, layers: Sequence[nn.Module], num_ranks: int) -> None:
    kind = type(module).__name__
    if not layers:
        raise WorkerFailed(f"ep is {num_ranks} and {kind} has no stacked experts; use a Qwen3-MoE model, or ep 1")
    for experts in layers:
        if getattr(experts, "has_bias", False) or getattr(experts, "is_transposed", False):
            raise WorkerFailed(
                f"ep is {num_ranks} and the experts of {kind} have biases or transposed weights; use ep 1"
            )
        if not getattr(experts, "is_concatenated", True) or getattr(experts, "has_post_expert_norm", False):
            raise WorkerFailed(f"ep is {num_ranks} and the experts of {kind} have a layout of their own; use ep 1")
        num_experts = experts.get_parameter(WEIGHTS[0]).shape[0]
        if num_experts % num_ranks:
            nearest = max(n for n in range(1, num_ranks) if num_experts % n == 0)
            raise WorkerFailed(
                f"ep is {num_ranks}, which does not divide the {num_experts} experts of {kind}; use ep {nearest}"
            )
    if getattr(module.config, "output_router_logits", False):
        raise WorkerFailed(
            f"output_router_logits is true in the configuration of {kind}, which asks for the router's auxiliary loss, "
            "and this backend has none; set it to false"
        )


def _experts_forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return [T, H], for each token the weighted sum of what its experts make of it.

    `hidden`: [T, H]; `index`: [T, K] int64, numbers of experts; `weights`: [T, K], of the router.
    """
    spread: Spread = experts.spread
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    forward = _summed if spread.replicated else _dispatched
    return forward(experts, spread, hidden, index, weights, dtype).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


def _dispatched(
    experts: Any, spread: Spread, hidden: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """Send each copy of a token to the owner of its expert; weigh and add what comes back."""
    num_ranks = dist.get_world_size(spread.group)
    flat = index.flatten()
    order = flat.argsort(stable=True)
    outgoing = torch.bincount(flat, minlength=num_ranks * spread.num_local).view(num_ranks, spread.num_local)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=spread.group)
    sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
    copies = hidden[order // index.shape[1]].to(dtype)
    arrived = _AllToAll.apply(copies, received, sent, spread.group)
    # They come sorted by sender, and within a sender by expert.
    local = torch.arange(spread.num_local, device=flat.device).repeat(num_ranks).repeat_interleave(incoming.flatten())
    by_expert = local.argsort(stable=True)
    results = _computed(experts, arrived[by_expert], incoming.sum(0).tolist())
    returned = _AllToAll.apply(results[by_expert.argsort()], sent, received, spread.group)
    return (returned[order.argsort()].view(*index.shape, hidden.shape[1]) * weights.unsqueeze(-1)).sum(1)


def _summed(experts: Any, spread: Spread, hidden: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute this rank's experts for the tokens that all ranks have; add the ranks' results."""
    hidden, weights = (_SumOfGradients.apply(tensor, spread.group) for tensor in (hidden, weights))
    first = dist.get_rank(spread.group) * spread.num_local
    local = index - first
    token, choice = ((local >= 0) & (local < spread.num_local)).nonzero(as_tuple=True)
    expert = local[token, choice]
    order = expert.argsort(stable=True)
    token, choice = token[order], choice[order]
    counts = torch.bincount(expert, minlength=spread.num_local).tolist()
    results = _computed(experts, hidden[token].to(dtype), counts) * weights[token, choice].unsqueeze(-1)
    mixed = torch.zeros_like(hidden).index_add(0, token, results.to(hidden.dtype))
    return _Sum.apply(mixed, spread.group)


def _computed(experts: Any, tokens: Tensor, counts: list[int]) -> Tensor:
    """Return [N, H] from [N, H], the first ``counts[0]`` tokens by this rank's first expert, and so on.

    An expert without tokens takes part all the same: its gradient is zero, not missing, on every rank.
    """
    inner, outer = (getattr(experts, name) for name in WEIGHTS)
    inner, outer = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (inner, outer))
    results: list[Tensor] = []
    for some, into, out_of in zip(tokens.split(counts), inner.unbind(), outer.unbind(), strict=True):
        gate, up = linear(some, into.to(some.dtype)).chunk(2, dim=-1)
        results.append(linear(experts.act_fn(gate) * up, out_of.to(some.dtype)))
    return torch.cat(results)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks, gradients back. Invariant: every rank of the group takes part in both directions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        """Return [sum(received), H] from [sum(sent), H], both sorted by rank."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchanged(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


def _exchanged(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Sum(torch.autograd.Function):
    """The ranks' sum. Invariant: the gradient of every rank's share is that of the sum, which all ranks have."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = share.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumOfGradients(torch.autograd.Function):
    """What all ranks have alike. Invariant: its gradient is the sum of what each rank's work gives, on every rank."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
