"""The engine beyond the kit: architectures, determinism, errors in a step, its own options."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from areal.builtins.transformers_engine.engine import TransformersEngine
from areal.builtins.transformers_engine.model import commit
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.contracts.engine import ReportsLoad
from areal.contracts.messages import Completion, GenerateRequest, Sampling
from areal.contracts.specs import EngineContext, ModelSpec
from areal.errors import ArealError, WorkerFailed
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model, tiny_module

T = TypeVar("T")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def make(path: str, dtype: Any = "float32", **options: Any) -> TransformersEngine:
    spec = ModelSpec(path=path, dtype=dtype)
    context = EngineContext(model=spec, accelerator=HostCpu(), name="engine-3", seed=0)
    return TransformersEngine(TransformersEngineOptions(**options), context)


def run(engine: TransformersEngine, work: Callable[[], Awaitable[T]]) -> T:
    """Start the engine, do the work, close the engine; everything within a deadline."""

    async def within() -> T:
        async with asyncio.timeout(60):
            try:
                await engine.start()
                return await work()
            finally:
                await engine.close()

    return asyncio.run(within())


def request(prompt: Sequence[int], seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(uid=f"r{seed}", prompt_ids=tuple(prompt), sampling=Sampling(**sampling), seed=seed)


def mixed(number: int, **sampling: Any) -> list[GenerateRequest]:
    return [request([1, 3 + i % 40, *[5 + i % 7] * (i % 9)], seed=i, **sampling) for i in range(number)]


async def gather(engine: TransformersEngine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_logprobs_agree_on_other_architectures(tmp_path: Path, arch: Any, attention: str) -> None:
    engine = make(tiny_model(tmp_path, arch=arch, tied=arch != "qwen2"), max_batch=5, attention=attention)
    module = tiny_module(arch=arch, tied=arch != "qwen2")
    for completion in run(engine, lambda: gather(engine, mixed(12, max_new_tokens=10))):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.inference_mode():
            truth = module(ids).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = truth[range(len(truth)), list(completion.token_ids)].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4, rel=0)


def test_bfloat16_runs_and_stays_near_float32(model_path: str) -> None:
    engine = make(model_path, dtype="bfloat16")
    module = tiny_module().bfloat16()
    for completion in run(engine, lambda: gather(engine, mixed(6, max_new_tokens=6))):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.inference_mode():
            truth = module(ids).logits[0, len(completion.prompt_ids) - 1 : -1].float().log_softmax(-1)
        expected = truth[range(len(truth)), list(completion.token_ids)].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=0.2, rel=0)


def test_two_engines_do_exactly_the_same(model_path: str) -> None:
    def once() -> tuple[list[Completion], dict[str, float]]:
        engine = make(model_path, max_batch=6)

        async def work() -> tuple[list[Completion], dict[str, float]]:
            return await gather(engine, mixed(30, max_new_tokens=15)), engine.load()

        return run(engine, work)

    assert once() == once()


def test_tokens_depend_neither_on_slots_nor_on_being_sent_back(model_path: str) -> None:
    def tokens(**options: Any) -> list[tuple[int, ...]]:
        engine = make(model_path, **options)
        return [c.token_ids for c in run(engine, lambda: gather(engine, mixed(12, max_new_tokens=24)))]

    plain = tokens()
    assert tokens(max_batch=3) == plain
    assert tokens(max_kv_tokens=60) == plain
    assert tokens(max_prefill_tokens=1) == plain


def test_requests_that_arrive_together_are_prefilled_together(model_path: str) -> None:
    engine = make(model_path)

    async def work() -> float:
        await gather(engine, [request([1, 5, 6, 7], seed=i, max_new_tokens=1) for i in range(64)])
        return engine.load()["steps_total"]

    assert run(engine, work) == 1


def test_load_counts_what_runs_and_what_waits(model_path: str) -> None:
    engine = make(model_path, max_batch=4, max_kv_tokens=1000)
    assert isinstance(engine, ReportsLoad)
    assert engine.load()["tokens_total"] == 0

    async def work() -> dict[str, float]:
        running = asyncio.ensure_future(gather(engine, mixed(10, max_new_tokens=400)))
        for _ in range(5):
            await asyncio.sleep(0)
        load = engine.load()
        for _ in range(10):
            await engine.pause("abort")
            await engine.resume()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await running
        return load

    load = run(engine, work)
    assert 1 <= load["running"] <= 4
    assert 3 <= load["waiting"] <= 6
    assert load["version"] == 0
    assert 0 < load["kv_usage"] < 1


def test_no_new_tokens_are_no_work(model_path: str) -> None:
    engine = make(model_path)

    async def work() -> tuple[Completion, float]:
        return await engine.generate(request([1, 2], max_new_tokens=0)), engine.load()["steps_total"]

    completion, steps = run(engine, work)
    assert (completion.token_ids, completion.finish_reason, steps) == ((), "length", 0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request([]), "empty prompt"),
        (request([1] * 510, max_new_tokens=3), "has 512 positions"),
        (request([64]), "outside 0..63"),
        (request([-1]), "outside 0..63"),
        (request([1], temperature=-1.0), "temperature -1.0; use 0"),
        (request([1], temperature=1e-9), "temperature 1e-09; use 0"),
        (request([1], temperature=float("nan")), "temperature nan; use 0"),
        (request([1], top_p=0.0), "top_p"),
        (request([1], top_k=-2), "top_k"),
        (request([1], max_new_tokens=-1), "max_new_tokens"),
    ],
)
def test_a_request_that_cannot_run_is_refused(model_path: str, asked: GenerateRequest, message: str) -> None:
    engine = make(model_path)

    async def work() -> Completion:
        with pytest.raises(ArealError, match=message) as caught:
            await engine.generate(asked)
        assert "\n" not in str(caught.value)
        return await engine.generate(request([1] * 10, max_new_tokens=2))

    assert len(run(engine, work).token_ids) <= 2


def test_a_failing_step_fails_its_requests_and_no_others(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(model_path, max_batch=4)

    async def work() -> tuple[list[Any], Completion]:
        model = engine._model
        assert model is not None
        monkeypatch.setattr(model, "decode", _out_of_memory)
        calls = [engine.generate(r) for r in mixed(4, max_new_tokens=5)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        monkeypatch.undo()
        return results, await engine.generate(request([1, 2, 3], max_new_tokens=5))

    results, completion = run(engine, work)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert len(errors) >= 3, "only a request that ended in the prefill could succeed"
    for error in errors:
        assert isinstance(error, ArealError)
        assert str(error).startswith("engine 'engine-3' failed in a step of 4 requests: RuntimeError: out of memory")
        assert "\n" not in str(error)
    assert completion.token_ids


def test_an_error_before_any_request_runs_ends_the_waiting_ones(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model_path)

    async def work() -> Completion:
        monkeypatch.setattr(engine._scheduler, "admit", _out_of_memory)
        with pytest.raises(ArealError, match="failed in a step of 0 requests"):
            await engine.generate(request([1, 2]))
        monkeypatch.undo()
        return await engine.generate(request([1, 2], max_new_tokens=2))

    assert run(engine, work).token_ids


def _out_of_memory(*args: object) -> Any:
    raise RuntimeError("out of memory\nsecond line")


def test_logits_that_are_not_finite_are_an_error_until_the_weights_are_good_again(model_path: str) -> None:
    engine = make(model_path)

    async def work() -> Completion:
        model = engine._model
        assert model is not None
        norm = model.parameters()["model.norm.weight"].data
        good = norm.clone()
        norm.fill_(float("nan"))
        with pytest.raises(ArealError, match=r"logits are not finite under weights of version 0"):
            await engine.generate(request([1, 2, 3], max_new_tokens=5))
        norm.copy_(good)
        return await engine.generate(request([1, 2, 3], max_new_tokens=5))

    assert run(engine, work).token_ids


def test_before_start_and_after_close_requests_are_refused(model_path: str) -> None:
    engine = make(model_path)

    async def work() -> None:
        with pytest.raises(WorkerFailed, match="'engine-3' is not started"):
            await engine.generate(request([1]))
        await engine.close()
        await engine.close()
        with pytest.raises(WorkerFailed, match="'engine-3' is closed"):
            await engine.generate(request([1]))

    asyncio.run(work())


def test_an_urgent_request_passes_those_that_have_not_begun(model_path: str) -> None:
    engine = make(model_path, max_batch=1)
    ended: list[str] = []

    async def ask(name: str, urgent: bool) -> None:
        await engine.generate(replace(request([1, 5, 9], max_new_tokens=4), uid=name, urgent=urgent))
        ended.append(name)

    async def work() -> None:
        await asyncio.gather(*(ask(str(number), False) for number in range(4)), ask("urgent", True))

    run(engine, work)
    assert ended.index("urgent") <= 1 and [name for name in ended if name != "urgent"] == ["0", "1", "2", "3"]


def test_a_commit_copies_into_views_only() -> None:
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    stacked = torch.zeros(2, 2)
    parameters = {"embedding": embedding.weight, "head": head.weight, "experts.1": stacked[1]}
    staged = {"head": torch.full((3, 2), 4.0), "experts.1": torch.ones(2)}
    held = head.weight
    commit(parameters, staged)
    assert held is head.weight is embedding.weight and isinstance(held, nn.Parameter)
    assert held.data_ptr() == staged["head"].data_ptr()
    assert embedding(torch.tensor([2])).tolist() == [[4.0, 4.0]]
    assert stacked.tolist() == [[0.0, 0.0], [1.0, 1.0]] and stacked.data_ptr() != staged["experts.1"].data_ptr()
