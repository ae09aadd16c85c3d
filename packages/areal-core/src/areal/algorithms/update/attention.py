"""Attention within the rows of a packed micro-batch, in the place where transformers calls its own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "areal_rows"
"""What the models' configurations call this attention."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroups:
    """The rows of a packed sequence of T tokens, in groups of similar length.

    Invariant: a row's tokens lie in its line from the left; what fills the line up on the right is seen by no token.
    """

    indices: tuple[Tensor, ...]
    """For each group [B, L] int64: which of the T tokens each row consists of."""
    first: Tensor
    """[T] int64: where each token stands first when all groups are laid out one after the other."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_groups: RowGroups,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within rows, [1, T, H, Dv]; query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv].

    Everything around attention works on the T tokens without padding; only here each group is laid out as [B, L].
    Dropout is off. ValueError for what some models add to plain attention and this function does not do.
    """
    if attention_mask is not None or others.get("softcap") or others.get("s_aux") is not None:
        raise ValueError("its attention has a mask of its own, capped scores or sinks")
    outputs: list[Tensor] = []
    # On CPUs bfloat16 attention is slower than float32.
    on_cpu = query.device.type == "cpu"
    with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
        for index in row_groups.indices:
            q, k, v = (_rows(states, index, on_cpu) for states in (query, key, value))
            length = index.shape[1]
            window = None
            if sliding_window is not None and sliding_window < length:
                window = _window(length, sliding_window, query.device)
            mixed = scaled_dot_product_attention(
                q, k, v, attn_mask=window, is_causal=window is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[row_groups.first].unsqueeze(0).to(query.dtype), None


def _rows(states: Tensor, index: Tensor, as_float: bool) -> Tensor:
    """Return [B, heads, L, D] from [1, heads, T, D]."""
    rows = states[0][:, index].transpose(0, 1)
    return rows.float() if as_float else rows


def _window(length: int, size: int, device: torch.device) -> Tensor:
    """Return [length, length] bool: a token sees itself and the `size` - 1 tokens before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - size)


AttentionInterface.register(NAME, attend)
