"""One episode's line to the engines: text in and out for the agent, tokens kept for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from areal.contracts.environment import Reply
from areal.contracts.messages import Completion, GenerateRequest, Sampling
from areal.errors import ConfigError


class Generate(Protocol):
    """The way to the engines. Invariant: returns a whole completion, or raises what is wrong with the request."""

    async def __call__(self, request: GenerateRequest) -> Completion: ...


Messages = Sequence[Mapping[str, str]]
_Key = tuple[tuple[tuple[str, str], ...], ...]


class ChatCodec:
    """Messages to token ids and back. Invariant: the same messages always give the same ids.

    A tokenizer with a chat template renders with it; one without joins the contents as they are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # All samples of a group open with the same messages.
        self._encode = lru_cache(maxsize=256)(self._encode_key)

    def render(self, messages: Messages, *, answer_next: bool = True) -> str:
        if self._tokenizer.chat_template:
            plain = [dict(message) for message in messages]
            return self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=answer_next)
        return "".join(message["content"] for message in messages)

    def encode(self, messages: Messages) -> tuple[int, ...]:
        """Return the prompt's ids; special tokens come from the template, or from the tokenizer without one."""
        return self._encode(tuple([tuple(message.items()) for message in messages]))

    def _encode_key(self, key: _Key) -> tuple[int, ...]:
        text = self.render([dict(message) for message in key])
        return tuple(self._tokenizer.encode(text, add_special_tokens=not self._tokenizer.chat_template))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of a piece of text, without special tokens of the tokenizer's own."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def demonstrate(self, messages: Messages, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (prompt ids, answer ids with the end-of-sequence token), what supervised warm-up learns."""
        return self.encode(messages), (*self.encode_text(answer), self._tokenizer.eos_token_id)


class EpisodeClient:
    """Implements `areal.contracts.environment.Client`. Invariant: `turns` holds every completion, in order.

    A conversation that goes on from the last turn is continued token by token: the new prompt is the old prompt,
    the tokens the model really said, and the newly rendered rest. Text is never re-tokenised for training.
    """

    def __init__(self, generate: Generate, codec: ChatCodec, sampling: Sampling, uid: str, seed: int) -> None:
        self._generate = generate
        self._codec = codec
        self._sampling = sampling
        self._uid = uid
        self._seed = seed
        self._num_asked = 0
        self._last: tuple[list[dict[str, str]], Reply] | None = None
        self.turns: list[Completion] = []

    async def chat(self, messages: Messages, *, max_new_tokens: int | None = None) -> Reply:
        number = self._num_asked  # and not len(turns): an agent may ask several times at once
        self._num_asked += 1
        sampling = self._sampling
        if max_new_tokens is not None:
            if max_new_tokens < 1:
                raise ConfigError(f"chat() was asked for max_new_tokens {max_new_tokens}; ask for at least 1")
            sampling = replace(sampling, max_new_tokens=max_new_tokens)
        request = GenerateRequest(
            uid=f"{self._uid}/{number}",
            prompt_ids=self._prompt_ids(messages),
            sampling=sampling,
            seed=self._seed + (number << 20),
        )
        completion = await self._generate(request)
        self.turns.append(completion)
        reply = Reply(text=self._codec.decode(completion.token_ids), completion=completion)
        self._last = ([dict(message) for message in messages], reply)
        return reply

    def _prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        if self._last is None:
            return self._codec.encode(messages)
        asked, reply = self._last
        said = [*asked, {"role": "assistant", "content": reply.text}]
        if [dict(message) for message in messages[: len(said)]] != said:
            return self._codec.encode(messages)
        before = self._codec.render(asked) + reply.text
        after = self._codec.render(messages)
        if not after.startswith(before):
            return self._codec.encode(messages)
        rest = self._codec.encode_text(after[len(before) :])
        spoken = reply.completion.prompt_ids + reply.completion.token_ids
        # The template closes the turn with the token that the model may have said itself.
        if rest and spoken[-1] == rest[0] and reply.finished:
            rest = rest[1:]
        return spoken + rest
