"""Whether a model computes packed rows as it computes each row alone; asked once, of one that a backend does not know.

Two rows with a common beginning show state that leaks between rows, attention that does more than the packed one, and
unknown work behind the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.contracts.messages import Row

TOLERANCE = 1e-3
"""Random tiny models have logprobs of about -4; what is not supported differs by far more."""
ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
"""What a model raises that is called in another way than it knows."""


def probe_rows(vocab_size: int) -> list[Row]:
    """Return two rows of tokens below `vocab_size`, all but the first of them trained."""
    return [_row([t % vocab_size for t in ids]) for ids in ([1, 5, 9, 3, 7, 2], [1, 5, 9, 4, 8, 6, 2, 3, 5])]


def own_logprobs(module: Any, rows: list[Row], device: torch.device) -> Tensor:
    """Return the logprobs of all trained tokens ([N] float32) by the model's own forward pass, row by row."""
    found: list[Tensor] = []
    for row in rows:
        ids = torch.tensor(row.token_ids, device=device)
        logits = module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1))
    return torch.cat(found)


def complaint(own: Tensor, packed: Tensor, tolerance: float = TOLERANCE) -> str:
    """Return in what the logprobs of packed rows differ from the model's own; empty: in nothing."""
    distance = float((packed - own).abs().max())
    if distance <= tolerance:
        return ""
    return f"its logprobs of packed rows are off by {distance:.1g} from those of single rows"


def _row(token_ids: list[int]) -> Row:
    num_tokens = len(token_ids)
    zeros = (0.0,) * num_tokens
    return Row(
        token_ids=tuple(token_ids),
        loss_mask=(False,) + (True,) * (num_tokens - 1),
        logprobs=zeros,
        versions=(0,) * num_tokens,
        advantages=zeros,
    )
