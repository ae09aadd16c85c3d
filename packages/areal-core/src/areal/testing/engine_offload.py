"""The engine kit's cases of giving the device's memory away, for engines that say they can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from areal.contracts.component import OFFLOAD, Component
from areal.contracts.engine import Engine, Offloads, ReportsLoad
from areal.contracts.messages import Completion
from areal.errors import WorkerFailed
from areal.testing.engine_fixtures import DELAYS_S, EngineFixtures, long_requests, new_stand
from areal.testing.stand import Stand


class EngineOffload(EngineFixtures):
    """Invariant: an engine makes the same tokens whether its memory was away in between or not."""

    @pytest.fixture
    def offloads(self, component: Component, stand: Stand) -> Offloads:
        """The running engine, if it offloads; an engine that has the methods says so, and the other way round."""
        assert isinstance(stand.engine, Offloads) == (OFFLOAD in component.capabilities), (
            "capability or methods missing"
        )
        if not isinstance(stand.engine, Offloads):
            pytest.skip("the engine does not declare 'offload'")
        return stand.engine

    def test_running_requests_go_on_where_they_were(self, stand: Stand, offloads: Offloads) -> None:
        async def interrupt(delay_s: float) -> tuple[list[Completion], bool]:
            running = [asyncio.ensure_future(stand.engine.generate(r)) for r in long_requests(stand, 6, seed=3)]
            await asyncio.sleep(delay_s)
            await stand.engine.pause("keep")
            num_done = sum(request.done() for request in running)
            await offloads.offload()
            await offloads.offload()
            await stand.engine.resume()  # somebody else's, such as a publisher's: nothing runs without memory
            tokens = _tokens(stand.engine)
            await asyncio.sleep(0.05)
            assert sum(request.done() for request in running) == num_done and _tokens(stand.engine) == tokens
            await stand.engine.pause("keep")
            await offloads.onload()
            await offloads.onload()
            await stand.engine.resume()
            return list(await asyncio.gather(*running)), num_done < len(running)

        undisturbed = stand.generate(long_requests(stand, 6, seed=3))
        for delay_s in DELAYS_S:
            completions, has_hit = stand.run(interrupt(delay_s))
            assert [c.token_ids for c in completions] == [c.token_ids for c in undisturbed]
            assert [c.finish_reason for c in completions] == [c.finish_reason for c in undisturbed]
            self.check_logprobs(stand, completions)
            if has_hit:
                break
        else:
            pytest.fail("no request was running when the memory was given away")

    def test_requests_are_taken_meanwhile_and_leave(self, stand: Stand, offloads: Offloads) -> None:
        async def arrive() -> list[Completion]:
            leaving = [asyncio.ensure_future(stand.engine.generate(r)) for r in long_requests(stand, 4)]
            await asyncio.sleep(0.02)
            await stand.engine.pause("keep")
            await offloads.offload()
            waiting = asyncio.ensure_future(stand.gather(long_requests(stand, 4, max_new_tokens=6)))
            for task in leaving[1:]:
                task.cancel()
            await asyncio.wait([waiting], timeout=0.05)
            assert not waiting.done(), "an engine without memory answered"
            await offloads.onload()
            await stand.engine.resume()
            return [await leaving[0], *await waiting]

        completions = stand.run(arrive())
        assert all(completion.finish_reason != "interrupted" for completion in completions)
        self.check_logprobs(stand, completions)

    def test_weights_are_staged_meanwhile_and_committed_afterwards(self, stand: Stand, offloads: Offloads) -> None:
        version = stand.new_version()

        async def update() -> list[Completion]:
            running = asyncio.ensure_future(stand.gather(long_requests(stand, 4)))
            await asyncio.sleep(0.02)
            await stand.engine.pause("keep")
            await offloads.offload()
            for attempt in ("forgotten", "kept"):
                sent = stand.send(version)
                assert (await stand.receive("stage", version)).checksums == sent.checksums
                if attempt == "forgotten":
                    await stand.receive("rollback", version)
            await offloads.onload()
            await stand.receive("commit", version)
            stand.version = version
            await stand.engine.resume()
            return await running

        self.check_logprobs(stand, stand.run(update()))
        self.check_answers(stand)

    def test_only_a_paused_engine_gives_its_memory_away(self, stand: Stand, offloads: Offloads) -> None:
        with pytest.raises(WorkerFailed, match="pause") as caught:
            stand.run(offloads.offload())
        assert "\n" not in str(caught.value)
        self.check_answers(stand)

    def test_close_without_memory_returns_interrupted(
        self, offloads: Offloads, make_engine: Callable[[str], Engine], tmp_path: Any
    ) -> None:
        stand = new_stand(make_engine, tmp_path, tied=True)
        stand.start()
        assert isinstance(stand.engine, Offloads)
        engine = stand.engine

        async def close() -> list[Completion]:
            running = asyncio.ensure_future(stand.gather(long_requests(stand, 6)))
            await asyncio.sleep(0.02)
            await stand.engine.pause("keep")
            await engine.offload()
            await stand.engine.close()
            return await running

        completions = stand.run(close())
        assert any(completion.finish_reason == "interrupted" for completion in completions)
        self.check_logprobs(stand, [completion for completion in completions if completion.token_ids])
        stand.close()


def _tokens(engine: Engine) -> float:
    return engine.load().get("tokens_total", 0.0) if isinstance(engine, ReportsLoad) else 0.0
