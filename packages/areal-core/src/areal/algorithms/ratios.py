"""Probability ratios between policies, finite whatever the logprobs are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: far beyond any clip range, and its square still fits in float32."""


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return ``new - old`` ([N] logprobs, nats) limited to +-LOG_RATIO_LIMIT; beyond it there is no gradient.

    Two probabilities of 0 compare as equal.
    """
    difference = new - old
    difference = difference.masked_fill(difference.isnan(), 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return ``exp(new - old)`` ([N]), the importance ratio of PPO (arXiv 1707.06347)."""
    return log_ratio(new, old).exp()


def behavior_weight(proximal: Tensor, behavior: Tensor, *, cap: float, mode: Literal["clamp", "mask"]) -> Tensor:
    """Return the weight of each token in the decoupled objective, without gradient ([N]).

    It is ``pi_proximal / pi_behavior``, which corrects for tokens sampled by older weights or by an engine that
    rounds differently (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298). Above `cap`, ``clamp`` keeps
    `cap` and ``mask`` drops the token (weight 0).
    """
    weight = ratio(proximal.detach(), behavior)
    if mode == "clamp":
        return weight.clamp(max=cap)
    return weight.masked_fill(weight > cap, 0.0)


def kl_estimate(new: Tensor, old: Tensor) -> Tensor:
    """Return an estimate of KL(old || new) from tokens sampled by `old`, never negative ([N], nats).

    ``exp(d) - 1 - d`` with ``d = new - old``: unbiased and of low variance (as used by GRPO, arXiv 2402.03300).
    """
    difference = log_ratio(new, old)
    return difference.expm1() - difference
