"""The engine kit's cases of pausing and of weight updates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal.contracts.messages import Completion
from areal.errors import TransferFailed
from areal.testing.engine_fixtures import DELAYS_S, EngineFixtures, long_requests
from areal.testing.stand import DEADLINE_S, Stand


class EngineUpdates(EngineFixtures):
    """Invariant: whatever happens to an update, every request ends and each token's version tells the truth."""

    def test_pause_and_resume_may_be_repeated(self, stand: Stand) -> None:
        async def repeat() -> list[Completion]:
            await stand.engine.resume()
            running = asyncio.ensure_future(stand.gather(long_requests(stand, 8)))
            for _ in range(3):
                await asyncio.sleep(0.01)
                await stand.engine.pause("keep")
                await stand.engine.pause("keep")
                await stand.engine.resume()
                await stand.engine.resume()
            return await running

        completions = stand.run(repeat())
        assert all(completion.finish_reason != "interrupted" for completion in completions)
        self.check_logprobs(stand, completions)

    @pytest.mark.parametrize("mode", ["keep", "abort"])
    def test_requests_that_arrive_while_paused_wait(self, stand: Stand, mode: Any) -> None:
        async def arrive() -> list[Completion]:
            await stand.engine.pause(mode)
            waiting = asyncio.ensure_future(stand.gather(long_requests(stand, 4, max_new_tokens=6)))
            await asyncio.wait([waiting], timeout=0.2)
            assert not waiting.done(), "a paused engine answered"
            await stand.engine.resume()
            return await waiting

        assert all(c.finish_reason != "interrupted" for c in stand.run(arrive()))

    def test_abort_returns_what_there_is(self, stand: Stand) -> None:
        async def abort(delay_s: float) -> list[Completion]:
            running = asyncio.ensure_future(stand.gather(long_requests(stand, 12)))
            await asyncio.sleep(delay_s)
            await stand.engine.pause("abort")
            await stand.engine.resume()
            return await running

        for delay_s in DELAYS_S:
            completions = stand.run(abort(delay_s))
            self.check_logprobs(stand, completions)
            interrupted = [c for c in completions if c.finish_reason == "interrupted"]
            if any(completion.token_ids for completion in interrupted):
                break
        else:
            pytest.fail("no request was interrupted with tokens in hand")
        self.check_answers(stand)

    def test_an_update_changes_versions_at_the_right_token(self, updated: Stand) -> None:
        async def update(version: int, delay_s: float) -> list[Completion]:
            running = asyncio.ensure_future(updated.gather(long_requests(updated, 16)))
            await asyncio.sleep(delay_s)
            await updated.update(version)
            return await running

        for delay_s in DELAYS_S:
            before, after = updated.version, updated.new_version()
            completions = updated.run(update(after, delay_s))
            for completion in completions:
                assert list(completion.versions) == sorted(completion.versions)
                assert set(completion.versions) <= {before, after}
            self.check_logprobs(updated, completions)
            if any(set(completion.versions) == {before, after} for completion in completions):
                break
        else:
            pytest.fail("no request lived through an update")
        self.check_answers(updated)

    def test_the_receipt_has_the_senders_checksums(self, updated: Stand) -> None:
        version = updated.new_version()
        sent = updated.send(version)
        received = updated.run(updated.update(version))
        assert received.version == version
        assert received.checksums == sent.checksums
        self.check_answers(updated)

    def test_updates_under_load_leave_no_request_hanging(self, stand: Stand) -> None:
        async def load() -> list[Completion]:
            running: list[asyncio.Future[list[Completion]]] = []
            for number in range(5):
                running.append(
                    asyncio.ensure_future(stand.gather(long_requests(stand, 6, seed=number, max_new_tokens=60)))
                )
                await asyncio.sleep(0.01)
                await stand.update(stand.new_version())
            return [completion for batch in await asyncio.gather(*running) for completion in batch]

        completions = stand.run(load())
        assert len(completions) == 30
        self.check_logprobs(stand, completions)

    @pytest.mark.parametrize("fault", ["missing tensor", "unknown tensor", "wrong shape", "wrong dtype", "dead sender"])
    def test_a_failed_update_leaves_the_old_weights_in_force(self, updated: Stand, fault: str) -> None:
        version = updated.new_version()
        tensors = updated.tensors(version)
        name = next(name for name in tensors if "layers.1" in name and tensors[name].dim() == 2)
        if fault == "missing tensor":
            del tensors[name]
        elif fault == "unknown tensor":
            tensors["model.layers.7.nothing.weight"] = tensors[name].clone()
        elif fault == "wrong shape":
            tensors[name] = tensors[name][1:]
        elif fault == "wrong dtype":
            tensors[name] = tensors[name].half()
        if fault != "dead sender":
            updated.send(version, tensors)

        async def fail() -> list[Completion]:
            running = asyncio.ensure_future(updated.gather(long_requests(updated, 4)))
            with pytest.raises(TransferFailed) as caught:
                await updated.receive("stage", version, 1.0 if fault == "dead sender" else DEADLINE_S)
            assert "\n" not in str(caught.value)
            await updated.engine.pause("keep")
            with pytest.raises(TransferFailed):
                await updated.receive("commit", version)
            await updated.receive("rollback", version)
            await updated.engine.resume()
            return await running

        self.check_logprobs(updated, updated.run(fail()))
        self.check_answers(updated)
        updated.run(updated.update(updated.new_version()))
        self.check_answers(updated)

    def test_only_what_is_staged_can_be_committed(self, stand: Stand) -> None:
        version = stand.new_version()

        async def commit() -> None:
            with pytest.raises(TransferFailed):
                await stand.receive("commit", version)
            stand.send(version)
            await stand.receive("stage", version)
            with pytest.raises(TransferFailed):
                await stand.receive("commit", version + 1)
            await stand.receive("rollback", version)
            await stand.receive("rollback", version)
            with pytest.raises(TransferFailed):
                await stand.receive("commit", version)

        stand.run(commit())
        self.check_answers(stand)
