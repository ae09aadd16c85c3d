"""Tensor parallelism: each rank has some heads of every attention, some columns of every MLP, some of the vocabulary.

Hidden states between the layers are the same on all ranks of a slice group, so what is not sliced (norms, a router, a
critic's head) is a copy on each and gets the same gradient on each. Sliced parameters are DTensors, so that FSDP,
checkpoints and resharders know what they are; the work is done on the local slices, without DTensor's dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from areal.errors import WorkerFailed
from areal_fsdp2.collectives import copied, summed
from areal_fsdp2.limits import PLANNED

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Linear maps of a decoder layer that are sliced by outputs."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Those that are sliced by inputs: the ranks' results are added up."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms within each head: copies that see some heads each, so that their gradients are added up."""


def slice_model(module: PreTrainedModel, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Slice parameters and the work on them; WorkerFailed for a family without a plan.

    Experts of a mixture are left whole. Parameters may be on the meta device.
    """
    if (kind := module.config.model_type) not in PLANNED:
        raise WorkerFailed(f"tensor parallelism has plans for {', '.join(PLANNED)}, not {kind!r}; use tp 1")
    group = mesh.get_group()
    for layer in layers:
        for names, prepare in ((COLUMNS, _slice_columns), (ROWS, _slice_rows), (HEAD_NORMS, _copy_norm)):
            for part in (part for name in names if (part := _find(layer, name)) is not None):
                prepare(part, mesh)
        layer.get_submodule("self_attn").register_forward_pre_hook(partial(_copy_input, group), with_kwargs=True)
        if _find(layer, "mlp.gate_proj") is not None:
            layer.get_submodule("mlp").register_forward_pre_hook(partial(_copy_input, group), with_kwargs=True)
    _slice_vocabulary(module, mesh)


def own_slice(parameter: Any) -> Any:
    """Return a rank's slice of a parameter, with gradient; None and what is not sliced as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _slice_columns(part: nn.Module, mesh: DeviceMesh) -> None:
    _spread(part, mesh, weight=0, bias=0)
    part.forward = lambda states: linear(states, own_slice(part.weight), own_slice(part.bias))


def _slice_rows(part: nn.Module, mesh: DeviceMesh) -> None:
    _spread(part, mesh, weight=1)
    group = mesh.get_group()

    def forward(states: Tensor) -> Tensor:
        whole = summed(linear(states, own_slice(part.weight)), group)
        bias = part._parameters["bias"]
        return whole if bias is None else whole + bias.to(whole.dtype)

    part.forward = forward


def _copy_norm(part: nn.Module, mesh: DeviceMesh) -> None:
    """Let a norm compute with a copy of its weight that adds up the ranks' gradients."""
    original: Callable[[Tensor], Tensor] = part.forward
    group = mesh.get_group()

    def forward(states: Tensor) -> Tensor:
        own = part._parameters["weight"]
        part._parameters["weight"] = cast(Any, copied(cast(Tensor, own), group))
        try:
            return original(states)
        finally:
            part._parameters["weight"] = own

    part.forward = forward


def _slice_vocabulary(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Slice the embeddings and the LM head, which stay one parameter if they are; who makes logits takes own rows.

    A stage of a pipeline may have one of them, or none.
    """
    embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is getattr(embeddings, "weight", None)
    if isinstance(head, nn.Linear) and not is_tied:
        _spread(head, mesh, weight=0, bias=0)
    if not isinstance(embeddings, nn.Embedding):
        return
    _spread(embeddings, mesh, weight=0)
    if isinstance(head, nn.Linear) and is_tied:
        head.weight = embeddings.weight
    first = mesh.get_local_rank() * (embeddings.num_embeddings // mesh.size())
    group = mesh.get_group()

    def forward(input: Tensor) -> Tensor:
        weight = own_slice(embeddings.weight)
        places = input - first
        is_own = (places >= 0) & (places < len(weight))
        padding = None if embeddings.padding_idx is None else embeddings.padding_idx - first
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        found = embedding(torch.where(is_own, places, 0), weight, padding)
        return summed(torch.where(is_own.unsqueeze(-1), found, 0.0), group)

    embeddings.forward = forward


def _spread(part: nn.Module, mesh: DeviceMesh, **dims: int) -> None:
    """Make parameters of a module, by name, slices along a dimension."""
    for name, dim in dims.items():
        if (parameter := part._parameters.get(name)) is not None:
            part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(dim)])))


def _copy_input(
    group: dist.ProcessGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (copied(args[0], group), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": copied(kwargs["hidden_states"], group)}


def _find(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
