"""Advantages: how much better a trajectory was than others, in plain numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

EPS = 1e-6
"""Keeps the quotient finite when all rewards but for rounding are equal."""


Baseline = Literal["group_mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "batch_std", "none"]


def group_advantages(
    rewards: Sequence[float | None],
    *,
    baseline: Baseline = "group_mean",
    divide_by_std: bool = True,
    std_floor: float = 0.0,
) -> list[float]:
    """Return an advantage for each sample of a group; `rewards`: [G], None for a sample without one.

    - ``group_mean``: ``reward - mean`` (GRPO, arXiv 2402.03300; undivided: Dr. GRPO, arXiv 2503.20783);
    - ``leave_one_out``: ``reward - mean of the others`` (RLOO, arXiv 2402.14740);
    - ``none``: the reward itself (REINFORCE).

    `divide_by_std`: over ``max(std, std_floor) + EPS``, the unbiased standard deviation (divisor n - 1), unless that is
    0. A sample without a reward gets 0 and counts in neither mean nor std. Against a baseline, equal rewards, a single
    one included, give exactly 0.
    """
    known = [reward for reward in rewards if reward is not None]
    if baseline != "none" and (len(known) < 2 or min(known) == max(known)):
        return [0.0] * len(rewards)
    mean = statistics.fmean(known) if known and baseline != "none" else 0.0
    # reward - mean of the others = (reward - mean) n / (n - 1)
    stretch = len(known) / (len(known) - 1) if baseline == "leave_one_out" else 1.0
    deviation = statistics.stdev(known) if divide_by_std and len(known) > 1 else 0.0
    floored = max(deviation, std_floor)
    scale = floored + EPS if divide_by_std and floored > 0 else 1.0
    return [0.0 if reward is None else stretch * (reward - mean) / scale for reward in rewards]


def discounted_turns(advantage: float, turn_lengths: Sequence[int], discount: float) -> list[float]:
    """Return an advantage for each sampled token of a trajectory whose turns have `turn_lengths` tokens.

    The last turn has `advantage`, each earlier one `discount` times that of the turn after it: what was said long
    before the reward had less to do with it.
    """
    last = len(turn_lengths) - 1
    return [advantage * discount ** (last - turn) for turn, length in enumerate(turn_lengths) for _ in range(length)]


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns ([T] each) of one sequence of T sampled tokens (GAE, arXiv 1506.02438).

    ``A_t = d_t + gamma lam A_(t+1)`` with ``d_t = r_t + gamma V_(t+1) - V_t`` and value 0 after the last token; the
    return is ``A_t + V_t``. `values`: [T], of the state in which each token was sampled.
    """
    advantages = [0.0] * len(rewards)
    following = next_value = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        next_value = values[t]
        advantages[t] = following
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def overlong_penalty(num_tokens: int, *, limit: int, buffer: int) -> float:
    """Return DAPO's soft penalty for long answers, in -1..0 (arXiv 2503.14476, equation 13).

    0 up to ``limit - buffer`` tokens, then falling linearly to -1 at `limit` tokens and beyond; `buffer` above 0.
    """
    over = num_tokens - (limit - buffer)
    return -min(1.0, over / buffer) if over > 0 else 0.0


def normalized(values: Sequence[float], *, center: bool) -> list[float]:
    """Return values over their biased standard deviation (plus EPS), less their mean before if `center`.

    Normalisation of a step's advantages: centred as in REINFORCE++ (arXiv 2501.03262), divided only as in Lite PPO
    (arXiv 2508.08221). Equal values have nothing to be divided by: they give 0 if centred, else stay.
    """
    if not values or min(values) == max(values):
        return [0.0] * len(values) if center else list(values)
    mean = statistics.fmean(values)
    scale = statistics.pstdev(values, mean) + EPS
    return [(value - mean if center else value) / scale for value in values]
