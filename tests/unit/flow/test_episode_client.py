"""One episode's line to the engine: what the model said is never tokenised again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from areal.contracts.messages import Completion, GenerateRequest, Sampling
from areal.flow.rollout.client import ChatCodec, EpisodeClient
from areal.testing.models import character_tokenizer

TEMPLATE = (
    "{% for message in messages %}<open>{{ message.role }}:{{ message.content }}<close>{% endfor %}"
    "{% if add_generation_prompt %}<open>assistant:{% endif %}"
)
EOS = 2


def tokenizer(template: bool) -> Any:
    made = character_tokenizer(96)
    made.add_special_tokens({"additional_special_tokens": ["<open>", "<close>"]})
    if template:
        made.chat_template = TEMPLATE
    return made


class Model:
    """Answers with prepared token ids. Invariant: `asked` holds every request in order."""

    def __init__(self, *answers: tuple[str | list[int], str]) -> None:
        self.answers = list(answers)
        self.asked: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        said, reason = self.answers.pop(0)
        ids = TOKENIZER.encode(said, add_special_tokens=False) if isinstance(said, str) else said
        return Completion(
            uid=request.uid,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(ids),
            logprobs=(-1.0,) * len(ids),
            versions=(0,) * len(ids),
            finish_reason=reason,  # type: ignore[arg-type]
        )


TOKENIZER = tokenizer(True)
OPEN, CLOSE = TOKENIZER.convert_tokens_to_ids(["<open>", "<close>"])


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def client_of(model: Model, *, template: bool = True, **sampling: int) -> EpisodeClient:
    return EpisodeClient(model, ChatCodec(tokenizer(template)), Sampling(**sampling), "7/3", 1000)  # type: ignore[arg-type]


async def test_a_single_turn() -> None:
    model = Model(([*ids("42"), CLOSE], "stop"))
    client = client_of(model, max_new_tokens=9)
    reply = await client.chat([user("6*7")])
    assert (reply.text, reply.finished) == ("42", True)
    (asked,) = model.asked
    assert asked.prompt_ids == (OPEN, *ids("user:6*7"), CLOSE, OPEN, *ids("assistant:"))
    assert (asked.uid, asked.seed, asked.sampling.max_new_tokens) == ("7/3/0", 1000, 9)
    assert client.turns == [reply.completion]


async def test_without_a_template_the_contents_are_joined() -> None:
    model = Model(([*ids("ab"), EOS], "stop"), (ids("c"), "length"))  # type: ignore[arg-type]
    client = client_of(model, template=False)
    reply = await client.chat([user("x="), user("1")])
    assert reply.text == "ab"
    await client.chat([user("x="), user("1"), assistant("ab"), user(" y")])
    first, second = model.asked
    assert first.prompt_ids == ids("x=1")
    assert second.prompt_ids == (*ids("x=1"), *ids("ab"), EOS, *ids(" y"))


async def test_turns_continue_token_by_token() -> None:
    # The model spells "ab" in a way in which the tokenizer never would: with a padding token between the letters.
    odd = [*ids("a"), 0, *ids("b")]
    model = Model(([*odd, CLOSE], "stop"), (list(ids("cd")), "length"), ([*ids("e"), CLOSE], "stop"))
    client = client_of(model)
    talk = [user("one")]
    for question in ("two", "three", ""):
        reply = await client.chat(talk)
        talk += [assistant(reply.text), user(question)]
    first, second, third = (asked.prompt_ids for asked in model.asked)
    assert second == (*first, *odd, CLOSE, OPEN, *ids("user:two"), CLOSE, OPEN, *ids("assistant:"))
    # The second answer was cut off, so the template closes it.
    assert third == (*second, *ids("cd"), CLOSE, OPEN, *ids("user:three"), CLOSE, OPEN, *ids("assistant:"))
    assert [asked.uid for asked in model.asked] == ["7/3/0", "7/3/1", "7/3/2"]
    assert len({asked.seed for asked in model.asked}) == 3
    for turn, asked in zip(client.turns, model.asked, strict=True):
        assert turn.prompt_ids == asked.prompt_ids


@pytest.mark.parametrize(
    "history",
    [
        [user("other"), assistant("ab"), user("two")],
        [user("one"), assistant("AB"), user("two")],
        [user("one")],
        [user("two")],
    ],
)
async def test_another_history_starts_a_new_prompt(history: list[dict[str, str]]) -> None:
    model = Model(([*ids("a"), 0, *ids("b"), CLOSE], "stop"), (list(ids("c")), "stop"))
    client = client_of(model)
    await client.chat([user("one")])
    await client.chat(history)
    assert model.asked[1].prompt_ids == ChatCodec(TOKENIZER).encode(history)


async def test_a_template_that_rewrites_answers_starts_a_new_prompt() -> None:
    model = Model(([*ids(" a "), CLOSE], "stop"), (list(ids("c")), "stop"))
    trimming = tokenizer(True)
    trimming.chat_template = TEMPLATE.replace("message.content", "message.content | trim")
    client = EpisodeClient(model, ChatCodec(trimming), Sampling(), "0/0", 0)
    reply = await client.chat([user("one")])
    talk = [user("one"), assistant(reply.text), user("two")]
    await client.chat(talk)
    assert model.asked[1].prompt_ids == ChatCodec(trimming).encode(talk)


async def test_questions_at_the_same_time_have_random_streams_of_their_own() -> None:
    model = Model(*[(list(ids("a")), "stop")] * 3)
    client = client_of(model)
    await asyncio.gather(*(client.chat([user("one")], max_new_tokens=size) for size in (1, 2, 3)))
    assert len({asked.seed for asked in model.asked}) == len({asked.uid for asked in model.asked}) == 3
    assert [asked.sampling.max_new_tokens for asked in model.asked] == [1, 2, 3]
    assert len(client.turns) == 3


def test_a_demonstration_ends_the_sequence() -> None:
    prompt, answer = ChatCodec(tokenizer(False)).demonstrate([user("12")], "21")
    assert (prompt, answer) == (ids("12"), (*ids("21"), EOS))


def test_special_tokens_come_once() -> None:
    plain = tokenizer(False)
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    codec = ChatCodec(plain)
    assert codec.encode([user("1")])[0] == plain.bos_token_id
    assert plain.bos_token_id not in codec.encode_text("1")
    plain.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    templated = ChatCodec(plain).encode([user("1")])
    assert templated.count(plain.bos_token_id) == 1


def test_encoding_is_remembered_for_the_group() -> None:
    calls: list[str] = []

    class Counting:
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            calls.append(text)
            return [len(text)]

    codec = ChatCodec(Counting())
    assert codec.encode([user("abc")]) == codec.encode([user("abc")]) == (3,)
    assert calls == ["abc"]
