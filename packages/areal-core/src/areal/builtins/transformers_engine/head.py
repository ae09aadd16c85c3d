"""The LM head as decoding wants it: for the last real token of each row, and in pieces that fit a CPU's cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Rows of weight per product. MKL's matrix product of few rows with a large vocabulary streams its packed weight
# through memory; pieces of this size stay in cache (SmolLM2, AVX2, 4 to 64 rows: 1.4 to 1.6 times as fast).
_PIECE_ROWS = 512


class LmHead:
    """Stands in for the head's forward. Invariant: the same product as the head's own, of fewer tokens.

    The selection is made here and not by ``logits_to_keep`` because rows of a padded pass end at different places,
    and not behind the model because some models scale or cap the logits after the head.
    """

    def __init__(self, head: nn.Module) -> None:
        self.index: Tensor | None = None
        """[rows] int64 position of each row's last real token; None: every position counts."""
        self._head = head
        self._forward = head.forward
        head.forward = self

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, 1, V] of the selected positions of `hidden` ([rows, T, H]), or of all: [rows, T, V]."""
        if self.index is not None:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), self.index].unsqueeze(1)
        head = self._head
        if not isinstance(head, nn.Linear) or head.weight.dtype != torch.float32 or head.weight.device.type != "cpu":
            return self._forward(hidden)
        logits = torch.cat([functional.linear(hidden, piece) for piece in head.weight.split(_PIECE_ROWS)], dim=-1)
        return logits if head.bias is None else logits + head.bias
