"""Losses of single tokens; an algorithm weights and sums them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token ([N]) and where clipping took its gradient ([N] bool).

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` (arXiv 1707.06347); two bounds as in DAPO's clip-higher
    (arXiv 2503.14476). With `dual_clip` c > 1 the loss of a negative advantage is at most ``-c A``
    (arXiv 1912.09729), which bounds what a token that has become much more likely can do.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = plain.minimum(bounded)
    clipped = bounded < plain
    if dual_clip is not None:
        floor = (dual_clip * advantages).masked_fill(advantages >= 0, float("-inf"))
        clipped = clipped | (objective < floor)
        objective = objective.maximum(floor)
    return -objective, clipped
