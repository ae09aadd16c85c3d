"""Losses of single tokens; an algorithm weights and sums them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOGPROB_FLOOR = -100.0
"""exp(-100) is 4e-44, about the smallest float32: no sampled token is less likely."""


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


def weighted_logprob(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return CISPO's loss of each token ([N]) and where its weight was clipped ([N] bool).

    ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi`` (MiniMax-M1, arXiv 2506.13585): clipping bounds a token's
    weight and, unlike PPO's, never takes its gradient. `logprobs` below LOGPROB_FLOOR count as that, without gradient.
    """
    plain = ratio.detach()
    weight = plain.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs.clamp(min=LOGPROB_FLOOR), weight != plain


def soft_gate(ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> Tensor:
    """Return SAPO's loss of each token ([N]): ``-(4 / t) sigmoid(t (r - 1)) A`` (arXiv 2511.20347).

    The temperature t is `positive` where the advantage is above 0, else `negative`. At ratio 1 the gradient is PPO's;
    away from it, it fades smoothly instead of being cut.
    """
    temperature = (advantages > 0).to(ratio.dtype) * (positive - negative) + negative
    return -(4 / temperature) * (temperature * (ratio - 1)).sigmoid() * advantages


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return PPO's loss of a critic at each token ([N]) and where clipping took its gradient ([N] bool).

    ``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``: a value that has moved by more than `clip`
    learns nothing more from this step unless it moved away (as in PPO's published code, arXiv 2005.12729).
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, plain.new_zeros(plain.shape).bool()
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    return plain.maximum(bounded) / 2, bounded > plain
