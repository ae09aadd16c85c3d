"""The fused LM head: from hidden states to logprobs and entropies of tokens, without the logits ever being whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK = 1024
"""Hidden states for which logits exist at once."""
TILE = 4096
"""Tokens of the vocabulary for which they do: a piece is 16 MB in float32, and two are alive at a time."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    predictor: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = CHUNK,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """Return logprobs ([N] float32, nats) and the entropies of the distributions they are from ([N] float32).

    `hidden`: [P, H] states; `predictor`: [N] int64, which of them predicts each of the `targets` ([N] int64).
    `weight` [V, H] and `bias` [V] make the logits, in autocast's dtype, else in that of `hidden`; times `scale`, capped
    by tanh at `softcap` and divided by `temperature` in float32. They are computed in pieces of `chunk` states times
    `tile` tokens, and again in the backward pass. A target outside the vocabulary has the logprob -inf.

    With `group`, `weight` and `bias` are this rank's slice of the vocabulary, from token `vocab_start` on; all else is
    the same on every rank, as must be the gradients of what is returned. Numbers of size P and N are exchanged in the
    forward pass, and the gradient of `hidden` in the backward pass.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    logits = _Logits(dtype, scale, softcap, temperature)
    pieces = _Pieces(len(hidden), len(weight), chunk, tile, vocab_start)
    logprobs, entropies = _HeadLogprobs.apply(hidden, weight, bias, predictor, targets, logits, pieces, group)
    return logprobs, entropies[predictor]


def logit_scaling(config: Any) -> tuple[float, float | None]:
    """Return `scale` and `softcap` of `head_logprobs` for a Hugging Face (text) configuration."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return scale, float(softcap) if softcap else None


@dataclass(frozen=True)
class _Logits:
    """How logits come from hidden states. Invariant: forward and backward pass compute the same ones."""

    dtype: torch.dtype
    """Of the matrix products."""
    scale: float
    softcap: float | None
    temperature: float

    @property
    def factor(self) -> float:
        """The derivative of logits with respect to the products, apart from the cap's."""
        return self.scale / self.temperature

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return new float32 logits from tensors in `dtype`."""
        logits = linear(hidden, weight, bias).float()
        if self.softcap is None:
            return logits if self.factor == 1.0 else logits.mul_(self.factor)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the cap's derivative, None for 1."""
        if self.softcap is None:
            return None
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


@dataclass(frozen=True)
class _Pieces:
    """Cuts P states times V tokens of a vocabulary. Invariant: each pair of them is in one piece."""

    num_states: int
    num_tokens: int
    chunk: int
    tile: int
    vocab_start: int

    def tiles(self) -> list[slice]:
        return [slice(low, min(low + self.tile, self.num_tokens)) for low in range(0, self.num_tokens, self.tile)]

    def chunks(self) -> list[slice]:
        return [slice(low, min(low + self.chunk, self.num_states)) for low in range(0, self.num_states, self.chunk)]

    def find(self, predictor: Tensor, targets: Tensor, chunk: slice, tile: slice) -> tuple[Tensor, Tensor]:
        """Return which targets ([N] bool) are in a piece, and where in it, flat ([N]; anywhere for the others).

        The sizes do not depend on the tokens, so an accelerator is never waited for.
        """
        height, width = chunk.stop - chunk.start, tile.stop - tile.start
        row, column = predictor - chunk.start, targets - (self.vocab_start + tile.start)
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        return inside, row.mul_(width).add_(column).remainder_(height * width)


class _HeadLogprobs(torch.autograd.Function):
    """Linear map, log-softmax, gather and entropy in one. Invariant: no more than two pieces of logits are alive.

    With ``p = softmax(x)``, ``H`` its entropy, ``a`` and ``b`` the gradients of logprob and entropy, the gradient
    of the logits x is ``a (onehot - p) - b p (log p + H)``. Tiles are the outer loop, so that a tile of the weight is
    cast once and the gradient of each is summed in float32; that of the states is summed in float32 over tiles.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        predictor: Tensor,
        targets: Tensor,
        logits: _Logits,
        pieces: _Pieces,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs [N] and entropies [P]."""
        sums = _Sums.empty(hidden, targets)
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(logits.dtype)
            for tile in pieces.tiles():
                part, offset = weight[tile].to(logits.dtype), None if bias is None else bias[tile].to(logits.dtype)
                for chunk in pieces.chunks():
                    piece = logits.of(states[chunk], part, offset)
                    sums.take_targets(piece, *pieces.find(predictor, targets, chunk, tile))
                    sums.add(piece, chunk)
        if group is not None:
            sums.combine(group)
        normaliser, entropies = sums.results()
        ctx.save_for_backward(hidden, weight, bias, predictor, targets, normaliser, entropies)
        ctx.logits, ctx.pieces, ctx.group = logits, pieces, group
        ctx.set_materialize_grads(False)
        return sums.target - normaliser[predictor], entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_logprobs, of_entropies = grads
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            found = _gradients(ctx, _Upstream.of(ctx, of_logprobs, of_entropies))
        return (*found, None, None, None, None, None)


class _Sums:
    """An online softmax. Invariant: the sums are those of what was added, relative to the largest logit in it."""

    def __init__(self, top: Tensor, total: Tensor, weighted: Tensor, target: Tensor) -> None:
        """`top`, `total`, `weighted`: [P], largest logit m, sum of exp(x - m) and of exp(x - m) (x - m); `target`: [N]
        logits of the targets.
        """
        self.top, self.total, self.weighted, self.target = top, total, weighted, target

    @classmethod
    def empty(cls, hidden: Tensor, targets: Tensor) -> _Sums:
        lowest = torch.finfo(torch.float32).min  # not -inf, which would make 0 * inf of the first sum
        top = torch.full((len(hidden),), lowest, dtype=torch.float32, device=hidden.device)
        target = torch.full((len(targets),), -torch.inf, dtype=torch.float32, device=hidden.device)
        return cls(top, torch.zeros_like(top), torch.zeros_like(top), target)

    def take_targets(self, piece: Tensor, inside: Tensor, index: Tensor) -> None:
        self.target = torch.where(inside, piece.view(-1)[index], self.target)

    def add(self, piece: Tensor, chunk: slice) -> None:
        """Add a piece of logits, which is overwritten."""
        self._move(chunk, torch.maximum(self.top[chunk], piece.amax(-1)))
        shifted = piece.sub_(self.top[chunk].unsqueeze(-1))
        exponentials = shifted.exp()
        self.total[chunk] += exponentials.sum(-1)
        self.weighted[chunk] += exponentials.mul_(shifted).sum(-1)

    def _move(self, chunk: slice, top: Tensor) -> None:
        drop = self.top[chunk] - top
        keep = drop.exp()
        self.weighted[chunk].addcmul_(drop, self.total[chunk]).mul_(keep)
        self.total[chunk].mul_(keep)
        self.top[chunk] = top

    def combine(self, group: dist.ProcessGroup) -> None:
        """Make the sums of all ranks' slices of the vocabulary from each rank's own."""
        largest = torch.cat([self.top, self.target])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        top, self.target = largest.split([len(self.top), len(self.target)])
        self._move(slice(None), top)
        both = torch.stack([self.total, self.weighted])
        dist.all_reduce(both, group=group)
        self.total, self.weighted = both.unbind()

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the sum of exp(x) and the entropy of the softmax ([P] each)."""
        spread = self.total.log()
        return self.top + spread, spread - self.weighted / self.total


@dataclass(frozen=True)
class _Upstream:
    """Gradients that come in, times what the products are multiplied by.

    Invariant: with `of_entropy` None nothing is computed for entropies.
    """

    of_token: Tensor
    """[N], of each logprob."""
    of_logprob: Tensor
    """[P, 1], of all logprobs of a predictor."""
    of_entropy: Tensor | None
    """[P, 1]."""
    normaliser: Tensor
    """[P, 1]."""
    entropies: Tensor
    """[P, 1]."""

    @classmethod
    def of(cls, ctx: Any, logprobs: Tensor | None, entropies: Tensor | None) -> _Upstream:
        predictor, targets, normaliser, entropy = ctx.saved_tensors[3:]
        of_token = normaliser.new_zeros(len(targets)) if logprobs is None else logprobs * ctx.logits.factor
        of_logprob = torch.zeros_like(normaliser).index_add_(0, predictor, of_token)
        return cls(
            of_token,
            of_logprob.unsqueeze(-1),
            None if entropies is None else (entropies * ctx.logits.factor).unsqueeze(-1),
            normaliser.unsqueeze(-1),
            entropy.unsqueeze(-1),
        )

    def to_products(self, piece: Tensor, chunk: slice, inside: Tensor, index: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient of the products that became a piece of logits, which is overwritten."""
        log_p = piece.sub_(self.normaliser[chunk])
        grad = log_p.exp()
        if self.of_entropy is None:
            grad.mul_(-self.of_logprob[chunk])
        else:
            share = -self.of_entropy[chunk]
            constant = torch.addcmul(-self.of_logprob[chunk], share, self.entropies[chunk])
            grad.mul_(torch.addcmul(constant, log_p, share, out=log_p))
        grad.view(-1).scatter_add_(0, index, torch.where(inside, self.of_token, 0.0))
        return grad if slope is None else grad.mul_(slope)


def _gradients(ctx: Any, upstream: _Upstream) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias that are wanted."""
    hidden, weight, bias, predictor, targets, *_ = ctx.saved_tensors
    logits: _Logits = ctx.logits
    pieces: _Pieces = ctx.pieces
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    states = hidden.to(logits.dtype)
    to_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
    to_weight = torch.empty_like(weight) if wants_weight else None
    to_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
    for tile in pieces.tiles():
        part, offset = weight[tile].to(logits.dtype), None if bias is None else bias[tile].to(logits.dtype)
        total = None if to_weight is None else _float32_zeros(to_weight[tile])
        for chunk in pieces.chunks():
            piece = logits.of(states[chunk], part, offset)
            found = pieces.find(predictor, targets, chunk, tile)
            grad = upstream.to_products(piece, chunk, *found, logits.slope(piece))
            del piece
            if to_bias is not None:
                to_bias[tile] += grad.sum(0)
            grad = grad.to(logits.dtype)
            if to_hidden is not None:
                _add_product(to_hidden[chunk], grad, part)
            if total is not None:
                _add_product(total, grad.T, states[chunk])
        if to_weight is not None and total is not None and total.dtype != to_weight.dtype:
            to_weight[tile] = total
    if to_hidden is not None and ctx.group is not None:
        dist.all_reduce(to_hidden, group=ctx.group)
    return _cast(to_hidden, hidden), to_weight, _cast(to_bias, bias)


def _float32_zeros(tensor: Tensor) -> Tensor:
    """Return the tensor itself, set to 0, or where it is of another dtype a new one."""
    return tensor.zero_() if tensor.dtype == torch.float32 else torch.zeros_like(tensor, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a float32 sum."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _cast(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if tensor is None or like is None else tensor.to(like.dtype)
