"""Probability ratios between policies, finite whatever the logprobs are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

BehaviorLevel = Literal["token", "sequence", "geometric"]
BehaviorMode = Literal["clamp", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]

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


def sequence_sum(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the sum of each sequence's values: `values` [N], `sequence` [N] int64 in 0..R-1, result [R]."""
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the mean of each sequence's values: `values` [N], `sequence` [N] int64 in 0..R-1, result [R].

    A sequence without values has mean 0.
    """
    counts = sequence.bincount(minlength=num_sequences).clamp(min=1)
    return sequence_sum(values, sequence, num_sequences) / counts


def behavior_weight(
    proximal: Tensor,
    behavior: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
    mode: BehaviorMode,
    level: BehaviorLevel = "token",
    sequence: Tensor,
    num_sequences: int,
) -> Tensor:
    """Return the weight of each token in the decoupled objective, without gradient ([N]).

    It is ``pi_proximal / pi_behavior``, which corrects for tokens sampled by older weights or by an engine that
    rounds differently (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298). With level ``sequence`` each token
    has the product over its sequence, with ``geometric`` that product's root of the sequence's length. Beyond `cap`
    or `floor`, ``clamp`` keeps the bound (truncated importance sampling) and ``mask`` drops the tokens (weight 0).
    """
    logs = log_ratio(proximal.detach(), behavior)
    if level != "token":
        gather = sequence_sum if level == "sequence" else sequence_mean
        logs = gather(logs, sequence, num_sequences).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[sequence]
    weight = logs.exp()
    if mode == "clamp":
        return weight.clamp(floor, cap)
    return weight.masked_fill((weight > cap) | (weight < floor), 0.0)


def kl_estimate(new: Tensor, old: Tensor, kind: KlEstimator = "k3") -> Tensor:
    """Return an estimate of KL(old || new) from each token sampled by `old` ([N], nats).

    With ``d = new - old`` (Schulman 2020, "Approximating KL Divergence"): k1 ``-d``, unbiased; k2 ``d^2 / 2``, of low
    variance; k3 ``exp(d) - 1 - d``, unbiased and of low variance (GRPO's, arXiv 2402.03300). k2 and k3 are never
    negative. As a loss, k1's gradient is 0 on average and k2's is that of the divergence.
    """
    difference = log_ratio(new, old)
    if kind == "k1":
        return -difference
    return difference.square() / 2 if kind == "k2" else difference.expm1() - difference


def interpolated(current: Tensor, behavior: Tensor, versions: Tensor, version: int) -> Tensor:
    """Return stand-ins for the proximal policy's logprobs, without a forward pass or gradient ([N]).

    Log-linear between the policy that sampled a token (`behavior`, [N], of `versions`, [N] int64) and the one being
    trained (`current`, [N]), which counts as version + 1: ``b + a (c - b)``, ``a = (version - v) / (version + 1 - v)``
    (A-3PO, arXiv 2512.06547). A token of this very version has its sampler's logprob.
    """
    age = (version - versions).clamp(min=0).to(current.dtype)
    return behavior + age / (age + 1) * log_ratio(current.detach(), behavior)
