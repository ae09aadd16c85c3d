"""The simulated engine keeps the engine's contract on a virtual clock; times are computed by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sim_workers import engine, request, transfer

from areal.builtins.hooks import areal_choose_resharder
from areal.builtins.sim.clock import VirtualLoop
from areal.builtins.sim.engine import SimEngine
from areal.contracts.engine import Engine, ReportsLoad
from areal.contracts.messages import Completion
from areal.contracts.transfer import Layout
from areal.errors import ArealError, TransferFailed, WorkerFailed

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(engine: SimEngine, *args: Any, **more: Any) -> tuple[float, Completion]:
    completion = await engine.generate(request(*args, **more))
    return now(), completion


async def update(engine: SimEngine, version: int) -> None:
    await engine.receive(transfer("stage", version))
    await engine.pause("keep")
    try:
        await engine.receive(transfer("commit", version))
    finally:
        await engine.resume()


def test_it_is_an_engine_that_reports_its_load_and_finds_its_resharder() -> None:
    async def work() -> Layout:
        made = engine(start_s=60.0)
        assert isinstance(made, Engine) and isinstance(made, ReportsLoad)
        with pytest.raises(WorkerFailed, match="not started"):
            await made.generate(request(1))
        layout = await made.start()
        assert now() == 60.0 and made.load()["busy_share"] == 0.0
        return layout

    layout = run(work())
    assert (layout.dtype, layout.tensors) == ("float32", ())
    assert areal_choose_resharder(layout, layout) == "sim"
    assert areal_choose_resharder(Layout(host="here"), layout) != "sim"


def test_requests_of_one_moment_run_together() -> None:
    async def work() -> list[float]:
        made = engine(prefill_s_per_token=0.5)
        await made.start()
        ends = await asyncio.gather(timed(made, 2), timed(made, 4), timed(made, 4))
        return [at for at, _ in ends]

    # 9 prompt tokens, two steps of three requests, two of two.
    assert run(work()) == [4.5 + 2 * 2.5, 4.5 + 2 * 2.5 + 2 * 2.0, 4.5 + 2 * 2.5 + 2 * 2.0]


def test_tokens_are_the_seeds_and_as_many_as_asked_for() -> None:
    async def work() -> list[Completion]:
        made = engine()
        await made.start()
        return await asyncio.gather(*(made.generate(request(100, seed)) for seed in (1, 1, 2)))

    first, again, other = run(work())
    assert len(first.token_ids) == len(first.logprobs) == len(first.versions) == 100
    assert (first.finish_reason, set(first.versions)) == ("length", {0})
    assert first == again and first.token_ids != other.token_ids
    assert all(logprob < 0 for logprob in first.logprobs)


def test_versions_change_where_the_weights_did() -> None:
    async def work() -> tuple[Completion, Completion]:
        made = engine(swap_s=10.0)
        await made.start()
        long = asyncio.ensure_future(made.generate(request(8)))
        await asyncio.sleep(3.2)
        await update(made, 1)  # in the third step, which ends at 4.5 and is still of version 0
        assert now() == 14.5
        await asyncio.sleep(1.0)
        late = asyncio.ensure_future(made.generate(request(3)))
        await asyncio.sleep(1.0)  # both run from 16.0 on, in steps of 2 s
        await update(made, 2)
        assert now() == 28.0
        return await long, await late

    long, late = run(work())
    assert long.versions == (0, 0, 0, 1, 1, 2, 2, 2)
    assert late.versions == (1, 2, 2)


def test_an_interrupted_answer_and_its_rest_are_the_whole_answer() -> None:
    async def work() -> tuple[Completion, Completion, Completion]:
        made = engine()
        await made.start()
        whole = await made.generate(request(10, 7))
        cut = asyncio.ensure_future(made.generate(request(10, 7)))
        await asyncio.sleep(4.0)
        await made.pause("abort")
        waiting = asyncio.ensure_future(made.generate(request(7, 7 + 3, prompt=6)))
        await asyncio.sleep(100.0)
        assert not waiting.done(), "new requests wait while it is paused"
        await made.resume()
        return whole, await cut, await waiting

    whole, cut, rest = run(work())
    assert (cut.finish_reason, len(cut.token_ids)) == ("interrupted", 3), "the pass that ran was finished"
    assert cut.token_ids + rest.token_ids == whole.token_ids
    assert cut.logprobs + rest.logprobs == whole.logprobs


def test_a_pause_ends_when_somebody_resumes_meanwhile() -> None:
    async def work() -> float:
        made = engine()
        await made.start()
        answer = asyncio.ensure_future(timed(made, 2))
        await asyncio.sleep(0.5)
        pausing = asyncio.ensure_future(made.pause())
        await asyncio.sleep(0.5)
        await made.resume()
        async with asyncio.timeout(10.0):
            await pausing
        await made.resume()
        return (await answer)[0]

    assert run(work()) == 3.0


def test_only_what_is_staged_is_committed_and_only_while_paused() -> None:
    async def work() -> None:
        made = engine()
        await made.start()
        await made.pause()
        with pytest.raises(TransferFailed, match="nothing is staged"):
            await made.receive(transfer("commit", 1))
        receipt = await made.receive(transfer("stage", 1, transfer_s=5.0))
        assert now() == 5.0 and receipt.checksums
        with pytest.raises(TransferFailed, match="version 1 is staged"):
            await made.receive(transfer("commit", 2))
        await made.receive(transfer("rollback", 1))
        with pytest.raises(TransferFailed, match="nothing is staged"):
            await made.receive(transfer("commit", 1))
        await made.receive(transfer("stage", 1))
        await made.resume()
        with pytest.raises(TransferFailed, match="pause it first"):
            await made.receive(transfer("commit", 1))
        assert made.load()["version"] == 0

    run(work())


def test_a_caller_that_goes_away_frees_its_place() -> None:
    async def work() -> tuple[float, float]:
        made = engine(max_running=1)
        await made.start()
        leaving = asyncio.ensure_future(made.generate(request(100)))
        waiting = asyncio.ensure_future(made.generate(request(100)))
        await asyncio.sleep(0.0)
        staying = asyncio.ensure_future(timed(made, 2))
        await asyncio.sleep(3.1)
        leaving.cancel()
        waiting.cancel()
        await asyncio.gather(leaving, waiting, return_exceptions=True)
        at, _ = await staying
        return at, made.load()["running"]

    assert run(work()) == (4.5 + 2 * 1.5, 0)


@pytest.mark.parametrize("asked", [{"prompt": 0}, {"num": 200_000}])
def test_a_request_that_does_not_fit_is_refused_and_the_engine_goes_on(asked: dict[str, int]) -> None:
    async def work() -> None:
        made = engine()
        await made.start()
        with pytest.raises(ArealError, match="request 'r'"):
            await made.generate(request(**({"num": 1} | asked)))
        assert len((await made.generate(request(4))).token_ids) == 4

    run(work())


def test_load_counts_busy_time_and_tokens_in_the_middle_of_a_stretch(tmp_path: Path) -> None:
    record = tmp_path / "engines.jsonl"

    async def work() -> dict[str, float]:
        made = engine(record=str(record), max_running=2)
        await made.start()
        asked = [asyncio.ensure_future(made.generate(request(num))) for num in (1, 3, 1)]
        await asyncio.sleep(4.1)
        load = made.load()
        await asyncio.gather(*asked)
        await asyncio.sleep(2.0)
        made.load()
        return load

    load = run(work())
    # Steps of 2 s: first and second request, second and third.
    assert (load["running"], load["waiting"], load["tokens_total"], load["busy_share"]) == (1, 0, 4, 1.0)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["time"], line["worked_s"], line["tokens"]) for line in lines] == [(4.1, 4.1, 4), (7.5, 5.5, 5)]


def test_close_returns_interrupted_and_may_be_repeated() -> None:
    async def work() -> list[Completion]:
        made = engine(max_running=1)
        await made.start()
        asked = [asyncio.ensure_future(made.generate(request(9))) for _ in range(2)]
        await asyncio.sleep(3.5)
        await made.close()
        await made.close()
        with pytest.raises(WorkerFailed, match="closed"):
            await made.generate(request(1))
        return await asyncio.gather(*asked)

    running, waiting = run(work())
    assert (running.finish_reason, len(running.token_ids)) == ("interrupted", 2)
    assert (waiting.finish_reason, waiting.token_ids) == ("interrupted", ())
