"""The engines as a rollout worker sees them: the least busy one, another one, the rest of an interrupted answer."""

from __future__ import annotations

import asyncio

import pytest
from flow_samples import handle_of, until
from hypothesis import given
from hypothesis import strategies as st

from areal.contracts.messages import Completion, FinishReason, GenerateRequest, Sampling
from areal.errors import ArealError, ConfigError, WorkerFailed
from areal.flow.rollout.engines import EnginePool, Queues


class ScriptedEngine:
    """Says 100, 101, ... counted from the length of the prompt. Invariant: `asked` holds every request in order."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.asked: list[GenerateRequest] = []
        self.open = asyncio.Event()
        self.open.set()
        self.cut: list[int] = []
        """How many tokens the next answers have before they are interrupted."""

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        await self.open.wait()
        limit = request.sampling.max_new_tokens
        size, reason = (self.cut.pop(0), "interrupted") if self.cut else (limit, "length")
        return self.answer(request, size, reason)

    def answer(self, request: GenerateRequest, size: int, reason: FinishReason | str) -> Completion:
        first = len(request.prompt_ids)
        return Completion(
            uid=request.uid,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(100 + first + position for position in range(size)),
            logprobs=tuple(-0.5 * (first + position) for position in range(size)),
            versions=(self.version,) * size,
            finish_reason=reason,  # type: ignore[arg-type]
        )


class Failing(ScriptedEngine):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        raise self.error


def request(uid: str = "0/0/0", max_new_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(
        uid=uid, prompt_ids=(1, 2, 3), sampling=Sampling(max_new_tokens=max_new_tokens, temperature=0.7), seed=50
    )


def pool_of(**engines: ScriptedEngine) -> EnginePool:
    pool = EnginePool()
    pool.replace({name: handle_of(name, engine) for name, engine in engines.items()})
    return pool


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_least_busy_engine_is_asked() -> None:
    one, two, three = ScriptedEngine(), ScriptedEngine(), ScriptedEngine()
    for engine in (one, two, three):
        engine.open.clear()
    pool = pool_of(one=one, two=two, three=three)
    tasks = [asyncio.create_task(pool.generate(request(str(number)))) for number in range(7)]
    await settle()
    assert [len(engine.asked) for engine in (one, two, three)] == [3, 2, 2]
    two.open.set()
    await until(lambda: sum(task.done() for task in tasks) == 2)
    tasks += [asyncio.create_task(pool.generate(request())) for _ in range(2)]
    await settle()
    assert len(two.asked) == 4, "the two that became free on it"
    one.open.set()
    three.open.set()
    assert [completion.uid for completion in await asyncio.gather(*tasks[:7])] == list("0123456")


async def test_a_dead_engine_gives_the_request_to_another() -> None:
    dying, healthy = ScriptedEngine(), ScriptedEngine()
    dying.open.clear()
    pool, handle = EnginePool(), handle_of("dying", dying)
    pool.replace({"dying": handle, "healthy": handle_of("healthy", healthy)})
    task = asyncio.create_task(pool.generate(request()))
    await settle()
    assert len(dying.asked) == 1 and not healthy.asked
    await handle.kill()
    completion = await asyncio.wait_for(task, 5)
    assert completion.token_ids == tuple(range(103, 109)) and healthy.asked == [request()]
    await pool.generate(request())
    assert len(dying.asked) == 1, "nobody asks the dead"


async def test_an_interrupted_answer_goes_on_elsewhere() -> None:
    first, second = ScriptedEngine(version=4), ScriptedEngine(version=5)
    first.cut, second.cut = [2], [1]
    pool = pool_of(first=first)
    first.open.clear()
    task = asyncio.create_task(pool.generate(request()))
    await settle()
    pool.replace({"second": handle_of("second", second)})
    first.open.set()
    whole = await asyncio.wait_for(task, 5)
    assert whole.prompt_ids == (1, 2, 3)
    assert whole.token_ids == (103, 104, 105, 106, 107, 108)
    assert whole.logprobs == (-1.5, -2.0, -2.5, -3.0, -3.5, -4.0)
    assert whole.versions == (4, 4, 5, 5, 5, 5)
    assert (whole.finish_reason, whole.uid) == ("length", "0/0/0")
    assert [asked.prompt_ids for asked in second.asked] == [(1, 2, 3, 103, 104), (1, 2, 3, 103, 104, 105)]
    assert [asked.sampling.max_new_tokens for asked in first.asked + second.asked] == [6, 4, 3]
    assert all(asked.sampling.temperature == 0.7 for asked in second.asked)
    assert len({asked.seed for asked in first.asked + second.asked}) == 3, "no random number is used twice"


async def test_an_answer_interrupted_after_its_last_token_is_whole() -> None:
    engine = ScriptedEngine()
    engine.cut = [6]
    completion = await pool_of(engine=engine).generate(request())
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    assert len(engine.asked) == 1


async def test_an_answer_interrupted_before_its_first_token_starts_anew() -> None:
    engine = ScriptedEngine()
    engine.cut = [0, 0]
    completion = await pool_of(engine=engine).generate(request())
    assert len(completion.token_ids) == 6
    assert engine.asked == [request()] * 3


async def test_without_engines_requests_wait_for_one() -> None:
    pool = EnginePool()
    tasks = [asyncio.create_task(pool.generate(request(str(number)))) for number in range(3)]
    await settle()
    assert not any(task.done() for task in tasks)
    engine = ScriptedEngine()
    pool.replace({"engine": handle_of("engine", engine)})
    assert [completion.uid for completion in await asyncio.wait_for(asyncio.gather(*tasks), 5)] == ["0", "1", "2"]
    pool.replace({})
    waiting = asyncio.create_task(pool.generate(request()))
    await settle()
    assert not waiting.done() and len(engine.asked) == 3
    waiting.cancel()


@pytest.mark.parametrize("error", [ConfigError("the prompt has 600 tokens, the model takes 512"), WorkerFailed("hung")])
async def test_what_the_engine_says_of_a_request_is_passed_on(error: ArealError) -> None:
    failing, other = Failing(error), ScriptedEngine()
    pool = pool_of(failing=failing)
    pool_with_other = pool_of(failing=failing, other=other)
    for asked in (pool, pool_with_other):
        with pytest.raises(type(error), match=str(error)):
            await asked.generate(request())
    assert not other.asked


@given(st.lists(st.tuples(st.sampled_from(["ask", "ask", "end", "lose"]), st.integers(0, 9)), max_size=80))
def test_the_least_busy_is_found_whatever_happened(events: list[tuple[str, int]]) -> None:
    names = [f"e{number}" for number in range(6)]
    queues, plain = Queues(dict.fromkeys(names, 0)), dict.fromkeys(names, 0)
    for what, number in events:
        busy = sorted(name for name, running in plain.items() if running)
        if what == "ask" and plain:
            name = queues.least()
            assert plain[name] == min(plain.values())
            queues.add(name)
            plain[name] += 1
        elif what == "end" and busy:
            name = busy[number % len(busy)]
            queues.end(name)
            plain[name] -= 1
        elif what == "lose" and len(plain) > 1:
            name = sorted(plain)[number % len(plain)]
            queues.remove(name)
            del plain[name]
            queues.end(name)  # its requests end later, and count nowhere
        assert {name: queues.get(name) for name in names} == {name: plain.get(name, 0) for name in names}


def test_equally_busy_engines_take_turns() -> None:
    queues = Queues(dict.fromkeys("abc", 0))
    asked = ""
    for _ in range(6):
        asked += queues.least()
        queues.add(asked[-1])
    assert asked == "abcabc"
