"""The trained tokens of a micro-batch as tensors, the way a loss reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from areal.algorithms.update.packing import Packed
from areal.contracts.algorithm import TokenBatch
from areal.contracts.messages import Batch, Row


def token_batch(
    batch: Batch, packed: Packed, current: Tensor, entropy: Tensor, *, computed_tokens: int, computed_groups: int
) -> TokenBatch:
    """Return the trained tokens of a micro-batch; rows without proximal logprobs take the `current` ones ([N])."""
    rows = [batch.rows[i] for i in packed.rows]
    numbers: dict[int, int] = {}

    def trained(field: Callable[[Row], Sequence[float]]) -> Tensor:
        return torch.tensor([x for row in rows for x in compress(field(row), row.loss_mask)], device=current.device)

    def optional(field: Callable[[Row], Sequence[float] | None]) -> Tensor | None:
        return None if any(field(row) is None for row in rows) else trained(lambda row: field(row) or ())

    return TokenBatch(
        behavior_logprobs=trained(lambda row: row.logprobs),
        proximal_logprobs=_proximal(rows, current),
        advantages=trained(lambda row: row.advantages),
        versions=trained(lambda row: row.versions),
        version=batch.version,
        first_update=batch.first_update,
        reference_logprobs=optional(lambda row: row.reference_logprobs),
        old_values=optional(lambda row: row.values),
        returns=optional(lambda row: row.returns),
        sequence=packed.sequence,
        num_sequences=len(rows),
        group=torch.tensor([numbers.setdefault(row.group, len(numbers)) for row in rows], device=current.device),
        entropy=entropy,
        total_tokens=batch.num_tokens,
        total_sequences=batch.num_sequences,
        computed_tokens=computed_tokens,
        computed_groups=computed_groups,
    )


def _proximal(rows: Sequence[Row], current: Tensor) -> Tensor:
    if all(row.proximal_logprobs is None for row in rows):
        return current
    parts = current.split([row.num_loss_tokens for row in rows])
    return torch.cat(
        [
            part
            if row.proximal_logprobs is None
            else part.new_tensor([*compress(row.proximal_logprobs, row.loss_mask)])
            for row, part in zip(rows, parts, strict=True)
        ]
    )
