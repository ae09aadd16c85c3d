"""Log-probabilities and entropies of tokens from hidden states, without keeping more than one copy of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [P, H] to logits [P, V]."""


def token_logprobs(
    head: Head, hidden: Tensor, predictor: Tensor, targets: Tensor, temperature: float, max_rows: int
) -> tuple[Tensor, Tensor]:
    """Return logprobs ([N] float32, nats) and the entropies of the distributions they are from ([N] float32).

    `hidden`: [P, H] states; `predictor`: [N] int64, which of them predicts each of the `targets` ([N] int64). Logits
    are divided by `temperature` in float32. At most `max_rows` states pass the head at once; if there are more, the
    logits are not kept but computed again in the backward pass.
    """
    if len(hidden) <= max_rows:
        logprobs, entropies = _LogSoftmax.apply(head(hidden), predictor, targets, temperature)
        return logprobs, entropies[predictor]

    def piece(states: Tensor, local: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return _LogSoftmax.apply(head(states), local, wanted, temperature)

    order = predictor.argsort(stable=True)
    starts = range(0, len(hidden), max_rows)
    bounds = torch.searchsorted(predictor[order], torch.tensor([*starts, len(hidden)], device=hidden.device)).tolist()
    logprobs, entropies = [], []
    for start, low, high in zip(starts, bounds, bounds[1:], strict=False):
        tokens = order[low:high]
        part = checkpoint(
            piece,
            hidden[start : start + max_rows],
            predictor[tokens] - start,
            targets[tokens],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(part[0])
        entropies.append(part[1])
    return torch.cat(logprobs)[order.argsort()], torch.cat(entropies)[predictor]


class _LogSoftmax(torch.autograd.Function):
    """Log-softmax, gather and entropy in one. Invariant: only the logits are kept for the backward pass.

    With ``p = softmax(x)``, ``H`` its entropy, ``a`` and ``b`` the gradients of logprob and entropy, the gradient
    of the scaled logits x is ``a (onehot - p) - b p (log p + H)``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, predictor: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs [N] and entropies [P] from logits [P, V] in any floating dtype."""
        scaled = logits.float() / temperature
        normaliser = scaled.logsumexp(-1)
        probabilities = (scaled - normaliser.unsqueeze(-1)).exp_()
        entropies = normaliser - torch.linalg.vecdot(probabilities, scaled)
        ctx.save_for_backward(logits, normaliser, entropies, predictor, targets)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return scaled[predictor, targets] - normaliser[predictor], entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        grad_logprobs, grad_entropies = grads
        logits, normaliser, entropies, predictor, targets = ctx.saved_tensors
        log_p = logits.float() / ctx.temperature - normaliser.unsqueeze(-1)
        factor = torch.zeros_like(normaliser)
        if grad_logprobs is not None:
            factor.index_add_(0, predictor, grad_logprobs)
        factor = factor.unsqueeze(-1)
        if grad_entropies is not None:
            factor = factor + grad_entropies.unsqueeze(-1) * (log_p + entropies.unsqueeze(-1))
        grad = log_p.exp_().mul_(factor).neg_()
        if grad_logprobs is not None:
            grad.index_put_((predictor, targets), grad_logprobs, accumulate=True)
        return grad.div_(ctx.temperature).to(logits.dtype), None, None, None
