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
from areal_fsdp2.collectives import copied, summed

NAME = "areal_spread"
"""What the models' configurations call this way to compute the experts."""
WEIGHTS = ("gate_up_proj", "down_proj")
"""The stacked weights of all experts of a layer: [E, 2 I, H], gate above up, and [E, H, I]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """How the experts of one layer are shared out.

    Invariant: rank (e, t) of the mesh has the `num_local` experts from number (e `num_columns` + t) `num_local` on.
    """

    num_local: int
    owners: dist.ProcessGroup | None
    """The ranks (.., t), which have tokens of their own; None: this one alone."""
    columns: dist.ProcessGroup | None
    """The ranks (e, ..), which have the same tokens; None: this one alone."""

    @property
    def num_columns(self) -> int:
        return 1 if self.columns is None else self.columns.size()

    @property
    def column(self) -> int:
        """t of this rank."""
        return 0 if self.columns is None else self.columns.rank()


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that hold stacked experts, in the order of the layers."""
    return [part for part in module.modules() if all(_is_stacked(part, name) for name in WEIGHTS)]


def spread_experts(module: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave to each rank of the mesh (``ep``, ``tp``) its share of each layer's experts; return what holds them.

    The parameters, on the meta device or not, become DTensors with placement Shard(0) on the flattened mesh. Ranks
    along ``ep`` have tokens of their own: copies travel to the experts and the results back. Ranks along ``tp`` have
    the same tokens: each does the work of its column of experts, and the sums are added. All ranks must make the same
    passes, even with zero tokens. The gradient of an expert's weight is the sum over the tokens of all ranks along
    ``ep``, not to be averaged; gradients of everything else, the router's too, are those of the rank's own tokens.

    The auxiliary loss that some models balance their router with is a product of two means over a batch, so that it
    would depend on the packing: it is never added, and a model whose configuration asks for it is refused, as is one
    whose experts have biases or another layout, or cannot be shared out evenly. WorkerFailed.
    """
    layers = expert_layers(module)
    _check(module, layers, mesh.size())
    flat = mesh._flatten("experts")
    owners, columns = (mesh.get_group(name) if mesh[name].size() > 1 else None for name in ("ep", "tp"))
    for experts in layers:
        num_local = experts.get_parameter(WEIGHTS[0]).shape[0] // flat.size()
        mine = slice(flat.get_local_rank() * num_local, (flat.get_local_rank() + 1) * num_local)
        for name in WEIGHTS:
            whole = experts.get_parameter(name)
            part = DTensor.from_local(whole.detach()[mine].clone(), flat, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        experts.spread = Spread(num_local=num_local, owners=owners, columns=columns)  # type: ignore
    module.set_experts_implementation(NAME)
    return layers


def rows_within_experts(weight: nn.Parameter, num_ranks: int) -> Shard:
    """Return how ranks with the same experts shard their weights: by rows of each, or if these do not divide by expert.

    By rows no rank is left empty, however few the experts are.
    """
    return Shard(1 if weight.shape[1] % num_ranks == 0 else 0)


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
    if spread.columns is not None:
        hidden, weights = (copied(tensor, spread.columns) for tensor in (hidden, weights))
    owner, local = index // spread.num_local, index % spread.num_local
    token, choice = (owner % spread.num_columns == spread.column).nonzero(as_tuple=True)
    number = (owner // spread.num_columns * spread.num_local + local)[token, choice]
    order = number.argsort(stable=True)
    token, choice, number = token[order], choice[order], number[order]
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    results = _from_owners(experts, spread, hidden[token].to(dtype), number)
    weighted = (results * weights[token, choice].unsqueeze(-1)).to(hidden.dtype)
    # Every copy has a place of its own, so that sums are in the same order whoever computes what.
    places = weighted.new_zeros(index.numel(), hidden.shape[1]).index_copy(0, token * index.shape[1] + choice, weighted)
    mixed = places.view(*index.shape, hidden.shape[1]).sum(1)
    return mixed if spread.columns is None else summed(mixed, spread.columns)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


def _from_owners(experts: Any, spread: Spread, copies: Tensor, number: Tensor) -> Tensor:
    """Return what the experts make of copies of tokens ([N, H]); `number`: [N] int64, ascending, within the column."""
    num_owners = 1 if spread.owners is None else spread.owners.size()
    outgoing = torch.bincount(number, minlength=num_owners * spread.num_local).view(num_owners, spread.num_local)
    if spread.owners is None:
        return _computed(experts, copies, outgoing[0].tolist())
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=spread.owners)
    sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
    arrived = _AllToAll.apply(copies, received, sent, spread.owners)
    # They come sorted by sender, and within a sender by expert.
    local = torch.arange(spread.num_local, device=number.device).repeat(num_owners)
    by_expert = local.repeat_interleave(incoming.flatten()).argsort(stable=True)
    results = _computed(experts, arrived[by_expert], incoming.sum(0).tolist())
    return _AllToAll.apply(results[by_expert.argsort()], sent, received, spread.owners)


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
