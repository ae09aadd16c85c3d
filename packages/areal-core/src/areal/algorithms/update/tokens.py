"""The trained tokens of a micro-batch as tensors, the way a loss reads them, and numbers of tokens by their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from areal.algorithms.update.packing import Packed
from areal.contracts.algorithm import TokenBatch
from areal.contracts.messages import Batch, Row
from areal.errors import ConfigError


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


def computed_totals(batch: Batch) -> dict[str, int]:
    """Return what `token_batch` is told of the whole batch, whatever its packing."""
    return {
        "computed_tokens": sum(row.num_loss_tokens for row in batch.rows),
        "computed_groups": len({row.group for row in batch.rows}),
    }


def check_vocabulary(batch: Batch, size: int, path: str) -> None:
    """Raise ConfigError for a token that the model in `path`, of a vocabulary of `size`, does not know."""
    largest = max((max(row.token_ids) for row in batch.rows), default=0)
    if largest >= size:
        raise ConfigError(
            f"token {largest} is outside the vocabulary of {path!r} ({size}); policy, engine and reference must have "
            "one tokenizer"
        )


def by_rows(batch: Batch, order: Iterable[int], numbers: Iterable[float]) -> list[tuple[float, ...]]:
    """Return for each row [T] numbers of its trained tokens, 0 for the others and in rows that are not in `order`.

    `numbers` [N]: those of the rows of `order`, one row after the other.
    """
    found = [[0.0] * len(row.token_ids) for row in batch.rows]
    stream = iter(numbers)
    for i in order:
        for t, is_trained in enumerate(batch.rows[i].loss_mask):
            if is_trained:
                found[i][t] = next(stream)
    return [tuple(row) for row in found]


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
