"""Weights that vLLM took only half, or not as they were sent: the engine stops for good and says why."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm_stands import VllmStand, vllm_stand

from areal.contracts.messages import Completion
from areal.errors import TransferFailed, WorkerDied
from areal.testing.engine_fixtures import long_requests
from areal_vllm import calls, weights
from areal_vllm.admission import QUEUED_STEPS, Admission


def break_it(stand: VllmStand) -> tuple[str, list[Any]]:
    """Update under load; return why the engine ended and how the requests did."""

    async def update() -> tuple[str, list[Any]]:
        running = [asyncio.ensure_future(stand.engine.generate(r)) for r in long_requests(stand, 4, max_new_tokens=400)]
        await asyncio.sleep(0.05)
        with pytest.raises(TransferFailed, match="version 1 and stops"):
            await stand.update(stand.new_version())
        reason = await asyncio.wait_for(stand.engine.ended(), 5)
        return reason, await asyncio.gather(*running, return_exceptions=True)

    return stand.run(update())


def check_stopped(stand: VllmStand, reason: str, ends: list[Any]) -> None:
    assert any(isinstance(end, WorkerDied) for end in ends)
    assert all(isinstance(end, WorkerDied | Completion) for end in ends)
    for completion in ends:
        if isinstance(completion, Completion):
            assert set(completion.versions) == {0}
    with pytest.raises(WorkerDied) as caught:
        stand.generate([stand.request([5])])
    assert str(caught.value) == reason


def test_a_load_that_breaks_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_vllm import transfer

    def broken(update_info: Any) -> Any:
        tensors = weights.tensors_of(update_info)
        last = list(tensors)[-1]
        return {**tensors, last: tensors[last][:1]}

    monkeypatch.setattr(transfer, "tensors_of", broken)
    with vllm_stand(tmp_path) as stand:
        reason, ends = break_it(stand)
        check_stopped(stand, reason, ends)


def test_a_head_that_was_not_packed_anew_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that vLLM has on a CPU and the patch mends: without it, the check of what was loaded must speak."""
    monkeypatch.setattr(weights, "pack_tied_heads", lambda model: None)
    with vllm_stand(tmp_path, tied=True, check_loaded="first") as stand:
        reason, ends = break_it(stand)
        assert "not what was sent" in reason and "embed_tokens" in reason
        check_stopped(stand, reason, ends)


def test_what_was_loaded_is_compared_tensor_by_tensor(tmp_path: Path) -> None:
    with vllm_stand(tmp_path, tied=False) as stand:
        stand.run(stand.update(stand.new_version()))
        stepper = stand.engine._stepper
        assert stepper is not None
        sent = {name: tensor.clone() for name, tensor in stand.tensors(1).items()}
        compared, different = stand.run(
            stepper.commands.call(lambda: calls.compare_weights(stepper.engine, {"tensors": sent}, 10.0))
        )
        assert compared == len(sent), "all of them can be read back"
        assert different == []
        for name in sent:
            changed = {**sent, name: sent[name].clone()}
            changed[name].view(-1)[-1] += 1e-3
            _, different = stand.run(
                stepper.commands.call(
                    lambda changed=changed: calls.compare_weights(stepper.engine, {"tensors": changed}, 10.0)
                )
            )
            assert name in different


def test_a_small_cache_teaches_the_engine_how_many_requests_it_can_take(tmp_path: Path) -> None:
    preemptions: dict[bool, float] = {}
    for adaptive in (False, True):
        # 1024 tokens of cache for 32 requests of up to 300.
        options = {"kv_cache_memory_bytes": 512 << 10, "block_size": 32, "adaptive_batch": adaptive}
        with vllm_stand(tmp_path / str(adaptive), **options) as stand:
            completions = stand.generate(long_requests(stand, 96))
            load = stand.engine.load()
            assert load["running"] == load["waiting"] == 0
            preemptions[adaptive] = load["preemptions_total"]
            assert (load["limit"] < 32) == adaptive
            stand.check(completions[::8], "recompute")
    assert preemptions[True] < preemptions[False] / 2


def test_the_limit_rises_again_one_by_one() -> None:
    admission = Admission(40, adaptive=True)
    admission.observe(20, 20, 3)
    assert admission.limit == 36
    for _ in range(10):
        admission.observe(20, 18, 1)  # above the limit: those have to leave first
    assert admission.limit == 36
    admission.observe(18, 18, 1)
    assert admission.limit == 32
    for _ in range(QUEUED_STEPS):
        admission.observe(30, 2, 0)
    assert admission.limit == 28, "queueing counts too"
    limits = []
    for _ in range(1000):
        admission.observe(admission.limit, 0, 0)
        limits.append(admission.limit)
    assert limits == sorted(limits) and limits[-1] == 40
    assert max(b - a for a, b in pairwise(limits)) == 1


def test_an_idle_engine_learns_nothing() -> None:
    admission = Admission(40, adaptive=True)
    admission.observe(40, 4, 2)
    limit = admission.limit
    for _ in range(1000):
        admission.observe(3, 0, 0)
    assert admission.limit == limit
