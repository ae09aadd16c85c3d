"""Sequence parallelism (Ulysses, arXiv 2309.14509): each rank has a part of the packed sequence, or some of its heads.

Outside attention a rank computes its own positions; around attention the ranks exchange these for all positions of
their own heads, and back. Rows may lie across the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from areal.algorithms.update.attention import RowGroups, attend
from areal.algorithms.update.packing import Packed
from areal_fsdp2.collectives import exchanged, summed

NAME = "areal_rows_exchanged"
"""What the models' configurations call this attention."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """This rank's part of a packed sequence of T tokens.

    Invariant: all ranks' stretches are equally long; the last ones are filled up with tokens that count for nothing.
    """

    group: dist.ProcessGroup
    num_tokens: int
    """T."""
    start: int
    length: int

    @classmethod
    def of(cls, packed: Packed, group: dist.ProcessGroup) -> Stretch:
        num_tokens = len(packed.token_ids)
        length = -(-num_tokens // group.size())
        return cls(group=group, num_tokens=num_tokens, start=group.rank() * length, length=length)

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's part ([length]) of what there is for each token ([T]); 0 for what is filled up."""
        part = values[self.start : self.start + self.length]
        return pad(part, (0, self.length - len(part)))

    def filled(self, states: Tensor) -> Tensor:
        """Return [.., T, D] filled up to all stretches' length."""
        return pad(states, (0, 0, 0, self.length * self.group.size() - self.num_tokens))

    def predictors(self, packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """Return which predictors lie here (positions in the stretch, [p]), and for each trained token whether its
        predictor does ([N] bool) and as the how-manieth of them ([N])."""
        bounds = torch.tensor([self.start, self.start + self.length], device=packed.predictors.device)
        low, high = torch.searchsorted(packed.predictors, bounds).tolist()
        is_own = (packed.predictor >= low) & (packed.predictor < high)
        return packed.predictors[low:high] - self.start, is_own, packed.predictor - low

    def gathered(self, numbers: tuple[Tensor, Tensor], is_own: Tensor) -> tuple[Tensor, Tensor]:
        """Return both [N] from each rank's [n] at the places of its own; gradients go to where a number is from."""
        whole = numbers[0].new_zeros(2, len(is_own))
        whole[:, is_own] = torch.stack(numbers)
        first, second = summed(whole, self.group)
        return first.clone(), second.clone()


def attend_exchanged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_groups: RowGroups,
    stretch: Stretch,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return what `attend` does, [1, length, H, Dv], of heads' states at this rank's positions ([1, heads, length, D]).

    Key-value heads that are fewer than the ranks are repeated.
    """
    size = stretch.group.size()
    repeats = max(1, size // key.shape[1])
    states = (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    q, k, v = (exchanged(part, 1, 2, stretch.group)[:, :, : stretch.num_tokens] for part in states)
    mixed, _ = attend(module, q, k, v, attention_mask, row_groups=row_groups, **others)
    return exchanged(stretch.filled(mixed.transpose(1, 2)), 2, 1, stretch.group).transpose(1, 2), None


AttentionInterface.register(NAME, attend_exchanged)
