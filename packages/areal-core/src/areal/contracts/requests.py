"""What an engine refuses before it begins: requests that no model could answer."""

from __future__ import annotations

import math

from areal.contracts.messages import GenerateRequest
from areal.errors import ArealError

MIN_TEMPERATURE = 1e-5
"""Logits divided by less could overflow."""


def check_request(request: GenerateRequest, engine: str, *, num_positions: int, vocab_size: int) -> None:
    """Raise ArealError for a request that the model of `engine` cannot take.

    `num_positions`: most tokens of a sequence, prompt and answer together. `vocab_size`: token ids lie below it.
    """
    sampling, size = request.sampling, len(request.prompt_ids)
    if size == 0:
        raise ArealError(f"request {request.uid!r} has an empty prompt; give at least one token")
    temperature = sampling.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        raise ArealError(
            f"request {request.uid!r} asks for temperature {temperature}; "
            f"use 0 for greedy decoding, or {MIN_TEMPERATURE} and more"
        )
    if sampling.max_new_tokens < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
        raise ArealError(
            f"request {request.uid!r} cannot be sampled with {sampling}; "
            "max_new_tokens and top_k start at 0, top_p lies in (0, 1]"
        )
    if size + sampling.max_new_tokens > num_positions:
        raise ArealError(
            f"request {request.uid!r} needs {size} prompt and {sampling.max_new_tokens} new tokens, the model of "
            f"engine {engine!r} has {num_positions} positions; shorten the prompt or lower max_new_tokens"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        raise ArealError(
            f"request {request.uid!r} holds a token id outside 0..{vocab_size - 1}, "
            f"the vocabulary of engine {engine!r}; encode it with the model's own tokenizer"
        )
