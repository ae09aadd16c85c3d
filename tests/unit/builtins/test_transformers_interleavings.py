"""Whatever the order of submit, pause, resume, abort, cancel and update: every request ends and tells the truth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.builtins.transformers_engine.engine import TransformersEngine
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.contracts.messages import Completion
from areal.contracts.specs import EngineContext, ModelSpec
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model
from areal.testing.stand import Stand

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 5)),
    st.tuples(st.just("turns"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["keep", "abort", "resume", "update", "cancel", "failed update"]), st.just(0)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interleavings")
    tiny_model(path / "model")
    return path


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
@given(actions=st.lists(ACTIONS, min_size=3, max_size=15), max_batch=st.sampled_from([1, 3, 16]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_ends(folder: Path, kv_on_update: str, actions: list[tuple[str, int]], max_batch: int) -> None:
    # A row that is sent back for room is recomputed, which only `recompute` expects.
    max_kv_tokens = 120 if kv_on_update == "recompute" else 10_000
    options = TransformersEngineOptions(
        max_batch=max_batch,
        max_kv_tokens=max_kv_tokens,
        kv_on_update=kv_on_update,  # type: ignore[arg-type]
    )
    spec = ModelSpec(path=str(folder / "model"))
    engine = TransformersEngine(options, EngineContext(model=spec, accelerator=HostCpu(), name="engine-0", seed=0))
    stand = Stand(engine, tied=True, folder=str(folder / "weights"))
    try:
        stand.start()
        completions = stand.run(_play(stand, actions))
        for completion in completions:
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
            assert list(completion.versions) == sorted(completion.versions)
            if completion.token_ids:
                truth = stand.truth(completion, 1.0, kv_on_update)  # type: ignore[arg-type]
                expected = truth[range(len(truth)), list(completion.token_ids)].tolist()
                assert completion.logprobs == pytest.approx(expected, abs=1e-4, rel=0)
        assert engine.load()["running"] == engine.load()["waiting"] == 0
    finally:
        stand.close()


async def _play(stand: Stand, actions: list[tuple[str, int]]) -> list[Completion]:
    tasks: list[asyncio.Future[Completion]] = []
    for action, number in actions:
        if action == "submit":
            for i in range(number):
                request = stand.request([1, 3 + i], seed=len(tasks), max_new_tokens=4 + 6 * i)
                tasks.append(asyncio.ensure_future(stand.engine.generate(request)))
        elif action == "turns":
            for _ in range(number):
                await asyncio.sleep(0)
        elif action == "resume":
            await stand.engine.resume()
        elif action == "update":
            await stand.update(stand.new_version())
        elif action == "failed update":
            await stand.receive("rollback", stand.version)
        elif action == "cancel":
            if tasks:
                tasks.pop().cancel()
        else:
            await stand.engine.pause("keep" if action == "keep" else "abort")
    await stand.engine.resume()
    return list(await asyncio.gather(*tasks))
