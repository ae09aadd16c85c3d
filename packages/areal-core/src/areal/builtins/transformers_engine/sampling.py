"""Sampling: from logits to tokens and logprobs, all rows at once, each row from its own random stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.contracts.messages import Sampling

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_LARGEST_UNIFORM = 1 - 2.0**-53
# Vocabularies of most models are multiples of it; others are searched as one block.
_BLOCK = 64


def _signed(value: int) -> int:
    """Return the int64 with the same low 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(state: Tensor) -> Tensor:
    """Return the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014) of [n] int64 states; int64 arithmetic wraps, and the masks make its shifts logical."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _signed(_MULTIPLIER_1)
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _signed(_MULTIPLIER_2)
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def uniforms(streams: Tensor, counts: Tensor) -> Tensor:
    """Return number `counts` ([n] int64, from 0) of each stream ([n] int64): [n] float64 multiples of 2**-53 in [0, 1).

    A function of its arguments alone: a request's numbers depend neither on its neighbours nor on what ran before.
    """
    bits = _mix(streams + (counts + 1) * _signed(_GAMMA))
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return [n] int64 indices drawn from `weights` ([n, V] float32, not negative) by `uniform` ([n] float64).

    The index is the first whose cumulated weight exceeds uniform times the total, so a weight of zero is never
    drawn: its cumulated weight equals its predecessor's. First the block that holds it is found, then the index
    within: cumulating a whole large vocabulary would cost as much as the softmax. A row that is not finite gives
    some index below V.
    """
    num_rows, size = weights.shape
    width = _BLOCK if size % _BLOCK == 0 else size
    blocks = weights.view(num_rows, -1, width)
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # uniform is at most 1 - 2**-53, and the product with it rounds to less than the total.
    target = (uniform * sums[:, -1]).unsqueeze(1)
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=weights.device), block.squeeze(1)].cumsum(dim=-1, dtype=torch.float64)
    # Summed in another order the block may come out a rounding smaller than what is left of the target.
    rest = torch.minimum(target - before, inside[:, -1:] * _LARGEST_UNIFORM)
    place = torch.searchsorted(inside, rest, right=True).clamp_(max=width - 1)
    return (block * width + place).squeeze(1)


def keep_most_probable(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return (kept, order): probabilities in falling order with the truncated ones 0, and their token ids.

    `probabilities`: [n, V] float32; `top_k`: [n] int64, 0 keeps all; `top_p`: [n] float32. Top-k comes first, top-p
    then counts mass among what top-k kept; the most probable token always stays. Equal probabilities keep the order
    of their ids.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    limit = torch.where(top_k > 0, top_k, ordered.shape[1])
    ordered = ordered.masked_fill(rank >= limit.unsqueeze(1), 0.0)
    cumulated = ordered.cumsum(dim=-1)
    before = cumulated - ordered
    enough = (before >= top_p.unsqueeze(1) * cumulated[:, -1:]) & (top_p < 1).unsqueeze(1)
    enough[:, 0] = False
    return ordered.masked_fill(enough, 0.0), order


@dataclass(slots=True)
class SamplingRows:
    """How each row of a batch is sampled. Invariant: row i depends on request i's sampling, seed and count only."""

    streams: Tensor
    """[n] int64."""
    counts: Tensor
    """[n] int64, tokens sampled so far; `sample` adds 1."""
    temperatures: Tensor | None
    """[n, 1] float32, 1 where greedy; None: all 1."""
    greedy: Tensor | None
    """[n] bool; None: no row is greedy."""
    all_greedy: bool
    truncated: Tensor | None
    """[m] int64 rows with top-k or top-p; None: there is none."""
    top_k: Tensor | None = None
    """[m] int64."""
    top_p: Tensor | None = None
    """[m] float32."""

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], seeds: Sequence[int], counts: Sequence[int], device: str
    ) -> SamplingRows:
        """Gather the parameters of one batch."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        cut = [i for i, s in enumerate(samplings) if not greedy[i] and (s.top_k > 0 or s.top_p < 1)]
        rows = cls(
            streams=_mix(torch.tensor([_signed(seed) for seed in seeds], device=device)),
            counts=torch.tensor(counts, device=device),
            temperatures=None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            truncated=torch.tensor(cut, device=device) if cut else None,
        )
        if any(temperature != 1.0 for temperature in temperatures):
            rows.temperatures = torch.tensor(temperatures, device=device).unsqueeze(1)
        if cut:
            rows.top_k = torch.tensor([samplings[i].top_k for i in cut], device=device)
            rows.top_p = torch.tensor([samplings[i].top_p for i in cut], device=device)
        return rows

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ([n] int64 tokens, [n] float32 logprobs of the whole vocabulary at temperature) for [n, V] logits.

        One random number per row, used or not. A row whose logits are not finite has logprob NaN.
        """
        logits = logits.to(torch.float32)
        scaled = logits if self.temperatures is None else logits / self.temperatures
        probabilities = scaled.softmax(dim=-1)
        tokens = logits.argmax(dim=-1) if self.all_greedy else self._draw(probabilities)
        if self.greedy is not None and not self.all_greedy:
            tokens = torch.where(self.greedy, logits.argmax(dim=-1), tokens)
        self.counts = self.counts + 1
        return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()

    def _draw(self, probabilities: Tensor) -> Tensor:
        uniform = uniforms(self.streams, self.counts)
        rows = self.truncated
        if rows is None or self.top_k is None or self.top_p is None:
            return inverse_cdf(probabilities, uniform)
        kept, order = keep_most_probable(probabilities[rows], self.top_k, self.top_p)
        drawn = order.gather(1, inverse_cdf(kept, uniform[rows]).unsqueeze(1)).squeeze(1)
        if len(rows) == len(probabilities):
            return drawn
        return inverse_cdf(probabilities, uniform).index_copy_(0, rows, drawn)
