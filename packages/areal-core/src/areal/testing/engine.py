"""The conformance kit of engines.

    class TestMine(EngineConformance):
        @pytest.fixture
        def component(self) -> Component:
            return Component(name="mine", factory="my_package.mine:Mine")

The kit writes tiny float32 models, starts one engine for each and shares it among the cases. Weight updates travel
through a folder (`areal.testing.transfer`), so that engines with processes of their own pass the same cases. Every
wait has a deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from areal.contracts.engine import Ends, Engine, ReportsLoad
from areal.contracts.messages import Completion
from areal.contracts.transfer import Layout
from areal.errors import ArealError, WorkerFailed
from areal.testing.engine_fixtures import POSITIONS, TOLERANCE, check_end, long_requests, new_stand, prompts
from areal.testing.engine_offload import EngineOffload
from areal.testing.engine_updates import EngineUpdates
from areal.testing.models import BOS
from areal.testing.stand import START_DEADLINE_S, Stand


class EngineConformance(EngineOffload, EngineUpdates):
    """Subclass it, give `component`, and `options` when there are any; set `kv_on_update` to what the engine does.

    Invariant: a case leaves its engine idle, resumed, and serving the stand's version.
    """

    def test_start_returns_how_the_weights_lie(self, stand: Stand) -> None:
        assert isinstance(stand.engine, Engine)
        assert isinstance(stand.layout, Layout)
        assert stand.layout.host
        assert (stand.layout.dtype, stand.layout.tensors) == ("float32", ())

    def test_a_missing_model_is_refused_in_one_sentence(
        self, make_engine: Callable[[str], Engine], tmp_path: Any
    ) -> None:
        path = str(tmp_path / "nothing-here")

        async def start() -> None:
            engine = make_engine(path)
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    await engine.start()
            finally:
                await engine.close()

        with pytest.raises(WorkerFailed, match="nothing-here") as caught:
            asyncio.run(start())
        assert "\n" not in str(caught.value)

    def test_greedy_is_the_most_probable_token_every_time(self, stand: Stand) -> None:
        requests = [stand.request(prompt, temperature=0.0, max_new_tokens=12) for prompt in prompts(6)]
        first, second = stand.generate(requests), stand.generate(reversed(requests))[::-1]
        for completion, again in zip(first, second, strict=True):
            assert completion.token_ids == again.token_ids
            truth = stand.truth(completion)
            chosen = truth[range(len(truth)), list(completion.token_ids)]
            assert float((truth.max(dim=1).values - chosen).max()) < TOLERANCE
        self.check_logprobs(stand, first)

    def test_many_requests_of_all_lengths_end_as_they_should(self, stand: Stand) -> None:
        rng = random.Random(1)
        requests = [
            stand.request(prompt, seed=i, max_new_tokens=rng.choice([1, 2, 3, 8, 40]))
            for i, prompt in enumerate(prompts(48, longest=30))
        ]
        completions = stand.generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            check_end(request, completion)
            assert set(completion.versions) == {stand.version}
        self.check_logprobs(stand, completions)

    def test_a_prompt_of_one_token_is_enough(self, stand: Stand) -> None:
        completions = stand.generate([stand.request([BOS], seed=i, max_new_tokens=6) for i in range(3)])
        assert all(completion.token_ids for completion in completions)
        self.check_logprobs(stand, completions)

    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
    def test_logprobs_are_those_of_transformers_at_the_temperature(self, stand: Stand, temperature: float) -> None:
        requests = [
            stand.request(prompt, seed=i, temperature=temperature, max_new_tokens=16)
            for i, prompt in enumerate(prompts(12))
        ]
        self.check_logprobs(stand, stand.generate(requests), temperature)

    @pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (5, 0.7)])
    def test_truncation_keeps_only_the_most_probable(self, stand: Stand, top_k: int, top_p: float) -> None:
        temperature = 1.3
        requests = [
            stand.request(p, seed=i, temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=16)
            for i, p in enumerate(prompts(12))
        ]
        completions = stand.generate(requests)
        self.check_logprobs(stand, completions, temperature)
        num_not_first = 0
        for completion in completions:
            truth = stand.truth(completion, temperature).exp()
            for row, token in zip(truth, completion.token_ids, strict=True):
                above = row[row > row[token] + TOLERANCE]
                num_not_first += len(above) > 0
                kept = row.sort(descending=True).values[: top_k or None].sum()
                assert not top_k or len(above) < top_k
                assert float(above.sum()) < top_p * float(kept) + TOLERANCE
        assert num_not_first > 0, "truncated sampling is still sampling"

    def test_a_stop_token_ends_the_answer_and_is_kept(self, stand: Stand) -> None:
        prompt = prompts(1)[0]
        (plain,) = stand.generate([stand.request(prompt, seed=5, max_new_tokens=20)])
        stop = plain.token_ids[min(4, len(plain.token_ids) - 1)]
        (stopped,) = stand.generate([stand.request(prompt, seed=5, max_new_tokens=20, stop_token_ids=(9_999, stop))])
        assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
        assert stopped.finish_reason == "stop"

    def test_tokens_do_not_depend_on_neighbours(self, stand: Stand) -> None:
        texts = prompts(10)
        requests = [stand.request(text, seed=100 + i, max_new_tokens=12) for i, text in enumerate(texts)]
        together = stand.generate(requests)
        alone = [stand.generate([request])[0] for request in requests[:4]]
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[:4]]
        others = stand.generate([stand.request(text, seed=200 + i, max_new_tokens=12) for i, text in enumerate(texts)])
        assert [c.token_ids for c in others] != [c.token_ids for c in together], "the seed must matter"

    def test_a_request_that_does_not_fit_is_refused_and_the_engine_goes_on(self, stand: Stand) -> None:
        with pytest.raises(ArealError):
            stand.generate([stand.request([BOS] * (POSITIONS + 1), max_new_tokens=4)])
        self.check_answers(stand)

    def test_a_caller_that_goes_away_disturbs_nobody(self, stand: Stand) -> None:
        async def leave() -> list[Completion]:
            leaving = [asyncio.ensure_future(stand.engine.generate(r)) for r in long_requests(stand, 4)]
            staying = asyncio.ensure_future(stand.gather(long_requests(stand, 4, seed=50)))
            await asyncio.sleep(0.02)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            return await staying

        self.check_logprobs(stand, stand.run(leave()))

    def test_load_is_told_without_work(self, stand: Stand) -> None:
        if not isinstance(stand.engine, ReportsLoad):
            pytest.skip("the engine does not report its load")
        before = stand.engine.load()
        (completion,) = stand.generate([stand.request([BOS], max_new_tokens=5)])
        after = stand.engine.load()
        assert after["running"] == after["waiting"] == 0
        assert 0.0 <= after["kv_usage"] <= 1.0
        assert after["tokens_total"] - before["tokens_total"] == len(completion.token_ids)

    def test_an_engine_that_can_serve_has_not_ended(self, stand: Stand) -> None:
        engine = stand.engine
        if not isinstance(engine, Ends):
            pytest.skip("the engine does not tell its own end")

        async def watch() -> None:
            ending = asyncio.ensure_future(engine.ended())
            await stand.gather([stand.request([BOS], max_new_tokens=5)])
            assert not ending.done()
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

        stand.run(watch())

    def test_close_returns_interrupted_and_may_be_repeated(
        self, make_engine: Callable[[str], Engine], tmp_path: Any
    ) -> None:
        stand = new_stand(make_engine, tmp_path, tied=True)
        stand.start()

        async def close() -> list[Completion]:
            running = asyncio.ensure_future(stand.gather(long_requests(stand, 6)))
            await asyncio.sleep(0.02)
            await stand.engine.pause("keep")
            await stand.engine.close()
            await stand.engine.close()
            return await running

        completions = stand.run(close())
        assert any(completion.finish_reason == "interrupted" for completion in completions)
        self.check_logprobs(stand, [completion for completion in completions if completion.token_ids])
        with pytest.raises(ArealError):
            stand.generate([stand.request([BOS])])
        stand.close()
