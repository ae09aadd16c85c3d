"""What an engine remembers of its answers: only the same question is answered from memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from flow_samples import handle_of

from areal.contracts.messages import Completion, FinishReason, GenerateRequest, Sampling
from areal.errors import ConfigError
from areal.flow.engine.recall import Recall
from areal.flow.rollout.engines import EnginePool


def question(uid: str = "3/1/0", *prompt: int) -> GenerateRequest:
    return GenerateRequest(uid=uid, prompt_ids=prompt or (1, 2), sampling=Sampling(max_new_tokens=4), seed=5)


class SlowEngine:
    """Answers when the gate opens. Invariant: `asked` is every request that cost tokens."""

    def __init__(self, reason: FinishReason = "stop", num_tokens: int = 3) -> None:
        self.asked: list[GenerateRequest] = []
        self.gate = asyncio.Event()
        self.reason: FinishReason = reason
        self.num_tokens = num_tokens
        self.failure: Exception | None = None
        self.memory = Recall(self.answer, most_bytes=5000)

    async def answer(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        await self.gate.wait()
        if self.failure:
            raise self.failure
        number = min(self.num_tokens, request.sampling.max_new_tokens)
        return Completion(
            uid=request.uid,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(range(7, 7 + number)),
            logprobs=(-1.0,) * number,
            versions=(len(self.asked),) * number,
            finish_reason=self.reason,
        )

    # as the engine's worker offers it
    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.memory.generate(request)

    async def knows(self, request: GenerateRequest) -> bool:
        return self.memory.knows(request)

    async def recall(self, request: GenerateRequest) -> Completion | None:
        return await self.memory.recall(request)


async def test_an_answer_is_recalled_while_it_is_made_and_afterwards() -> None:
    engine = SlowEngine()
    first = asyncio.create_task(engine.generate(question()))
    await asyncio.sleep(0)
    assert engine.memory.knows(question())
    second = asyncio.create_task(engine.recall(question()))
    await asyncio.sleep(0)
    engine.gate.set()
    assert await second == await first == await engine.recall(question())
    assert len(engine.asked) == 1 and engine.memory.num_recalled == 2


async def test_who_waits_for_a_recalled_answer_may_go_without_taking_it_away() -> None:
    engine = SlowEngine()
    first = asyncio.create_task(engine.generate(question()))
    await asyncio.sleep(0)
    second = asyncio.create_task(engine.recall(question()))
    await asyncio.sleep(0)
    second.cancel()
    engine.gate.set()
    assert (await first).token_ids == (7, 8, 9)


async def test_whoever_asked_first_can_take_the_request_back() -> None:
    engine = SlowEngine()
    first = asyncio.create_task(engine.generate(question()))
    await asyncio.sleep(0)
    second = asyncio.create_task(engine.recall(question()))
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.wait_for(second, 5) is None and not engine.memory.knows(question())


@pytest.mark.parametrize(
    "other",
    [question("3/1/1"), question("3/1/0", 1, 3), replace(question(), seed=6)],
    ids=["uid", "prompt", "seed"],
)
async def test_another_question_is_not_known(other: GenerateRequest) -> None:
    engine = SlowEngine()
    engine.gate.set()
    await engine.generate(question())
    assert not engine.memory.knows(other) and await engine.recall(other) is None


async def test_failures_and_interrupted_answers_are_not_kept() -> None:
    engine = SlowEngine("interrupted")
    engine.gate.set()
    await engine.generate(question())
    assert not engine.memory.knows(question())
    engine.failure = ConfigError("too long")
    with pytest.raises(ConfigError):
        await engine.generate(question())
    assert not engine.memory.knows(question())


async def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    engine = SlowEngine()
    engine.gate.set()
    for number in range(5):
        await engine.generate(question(f"{number}/0/0"))
    assert [engine.memory.knows(question(f"{number}/0/0")) for number in range(5)] == [False, False, True, True, True]
    for _ in range(5):
        await engine.generate(question("9/0/0"))
    assert engine.memory.knows(question("4/0/0")), "the same answer again takes the place of the one before"


async def test_long_prompts_count_too() -> None:
    engine = SlowEngine(num_tokens=1)
    engine.gate.set()
    prompts = [tuple(range(number, number + 30)) for number in range(3)]
    for number, prompt in enumerate(prompts):
        await engine.generate(question(f"{number}/0/0", *prompt))
    known = [engine.memory.knows(question(f"{number}/0/0", *prompt)) for number, prompt in enumerate(prompts)]
    assert known == [False, True, True], "30 tokens of a prompt are 1,200 bytes, whatever the answer is"


async def test_a_pool_finds_the_engine_that_knows() -> None:
    engines = {f"engine-{number}": SlowEngine() for number in range(3)}
    for engine in engines.values():
        engine.gate.set()
    pool = EnginePool()
    pool.replace({name: handle_of(name, engine) for name, engine in engines.items()})
    made = await engines["engine-2"].generate(question())
    assert await pool.recall(question()) == made
    assert [len(engine.asked) for engine in engines.values()] == [0, 0, 1]
    assert (await pool.recall(question("8/0/0"))).token_ids == (7, 8, 9), "what nobody knows is made"


async def test_a_pool_goes_on_from_what_was_interrupted() -> None:
    leaving, staying = SlowEngine("interrupted", num_tokens=1), SlowEngine()
    staying.gate.set()
    pool = EnginePool()
    pool.replace({"a": handle_of("a", leaving), "b": handle_of("b", staying)})
    first = asyncio.create_task(leaving.generate(question()))
    await asyncio.sleep(0)
    again = asyncio.create_task(pool.recall(question()))
    await asyncio.sleep(0.01)
    pool.replace({"b": handle_of("b", staying)})
    leaving.gate.set()
    await first
    whole = await asyncio.wait_for(again, 5)
    assert whole.prompt_ids == (1, 2) and whole.token_ids == (7, 7, 8, 9)
    assert staying.asked[0].prompt_ids == (1, 2, 7)
