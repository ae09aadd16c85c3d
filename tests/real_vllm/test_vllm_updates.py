"""Weights from a trainer's process into the real vLLM, by every road, into one rank and two, and what goes wrong."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_stands import VllmStand, vllm_stand
from vllm_trainer import TrainerProcess, trainer_layout

from areal.builtins.hooks import areal_resharders
from areal.contracts.messages import Completion
from areal.contracts.transfer import Receipt, Transfer, checksum
from areal.errors import TransferFailed, WorkerDied
from areal.testing.engine_fixtures import long_requests

RESHARDERS = {component.name: component for component in areal_resharders()}
ROADS = {"disk": ("disk", {}), "xccl": ("xccl", {"shared_memory": "never"}), "shm": ("xccl", {"shared_memory": "auto"})}
HIDDEN = 128
DEADLINE_S = 30.0
DEATH_DEADLINE_S = 10.0
"""Long enough for the trainer's process to start and die."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def stand(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStand]:
    options = {"tensor_parallel_size": request.param, "check_loaded": "always"}
    with vllm_stand(tmp_path_factory.mktemp("updated"), tied=True, hidden=HIDDEN, **options) as stand:
        yield stand


class Road:
    """One way of the weights. Invariant: a plan is used once, as after a failed publish."""

    def __init__(self, stand: VllmStand, road: str, run_dir: Path) -> None:
        name, table = ROADS[road]
        self.stand = stand
        self.component = RESHARDERS[name]
        self.options = self.component.parse_options(table)
        self._resharder = self.component.load()(self.options, str(run_dir))

    async def update(self, version: int, *, commit: bool = True, die_after: int | None = None) -> Receipt:
        tensors = self.stand.tensors(version)
        plan = self._resharder.plan(trainer_layout(tensors), [self.stand.layout])
        model = {"seed": version, "tied": True, "hidden": HIDDEN}
        trainer = TrainerProcess(self.component, self.options, plan, version, model, die_after)

        def phase(name: Any) -> Transfer:
            return Transfer(
                phase=name,
                version=version,
                resharder=self.component,
                options=self.options,
                plan=plan,
                deadline_s=DEADLINE_S if die_after is None else DEATH_DEADLINE_S,
            )

        try:
            receipt = await self.stand.engine.receive(phase("stage"))
            assert receipt.checksums == {name: checksum(tensor) for name, tensor in tensors.items()}
            if commit:
                await self.stand.engine.pause()
                await self.stand.engine.receive(phase("commit"))
                self.stand.version = version
        finally:
            await self.stand.engine.resume()
            await asyncio.to_thread(trainer.close)
        return receipt


def answers(stand: VllmStand) -> list[Completion]:
    completions = stand.generate(long_requests(stand, 4, max_new_tokens=12))
    assert {version for completion in completions for version in completion.versions} == {stand.version}
    return completions


@pytest.mark.parametrize("road", ROADS)
def test_weights_arrive_by_every_road(stand: VllmStand, road: str, tmp_path: Path) -> None:
    stand.run(Road(stand, road, tmp_path).update(stand.new_version()))
    stand.check(answers(stand))


@pytest.mark.parametrize("road", ROADS)
def test_a_trainer_that_dies_half_way_leaves_the_old_version_answering(
    stand: VllmStand, road: str, tmp_path: Path
) -> None:
    before = stand.version
    way = Road(stand, road, tmp_path)
    began = time.monotonic()
    with pytest.raises(TransferFailed):
        stand.run(way.update(stand.new_version(), die_after=5))
    assert time.monotonic() - began < DEADLINE_S + 5
    assert stand.version == before
    stand.check(answers(stand))
    stand.run(Road(stand, road, tmp_path).update(stand.new_version()))
    stand.check(answers(stand))


def test_what_was_staged_is_not_committed_after_a_rollback(stand: VllmStand, tmp_path: Path) -> None:
    version = stand.new_version()
    stand.send(version)
    stand.run(stand.receive("stage", version))
    stand.run(stand.receive("rollback", version))
    with pytest.raises(TransferFailed, match="nothing is staged"):
        stand.run(stand.receive("commit", version))
    stand.check(answers(stand))


def open_memory() -> list[str]:
    links: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()))
    return [link for link in links if "areal-engine-0-weights" in link]


def test_no_memory_of_a_version_stays(stand: VllmStand) -> None:
    version = stand.new_version()
    stand.send(version)
    stand.run(stand.receive("stage", version))
    assert len(open_memory()) == stand.layout.num_ranks - 1
    stand.run(stand.receive("commit", version))
    stand.version = version
    assert open_memory() == []


def test_a_long_prompt_never_reuses_keys_of_older_weights(stand: VllmStand) -> None:
    prompt = [3 + number % 60 for number in range(300)]  # longer than vLLM's blocks, so that its prefix is cached

    def ask() -> list[Completion]:
        return stand.generate([stand.request(prompt, seed=seed, max_new_tokens=6) for seed in range(4)])

    first, again = ask(), ask()
    cached = stand.engine.load()["cached_tokens_total"]
    assert cached > 4 * 100, "the second time the prompt comes from the cache"
    stand.run(stand.update(stand.new_version()))
    after = ask()
    stand.check(first + again)
    stand.check(after)
    assert len({completion.token_ids for completion in after}) > 1, "samples of one prompt differ"


def test_prompts_that_a_step_does_in_part_give_the_same_tokens(tmp_path: Path) -> None:
    """vLLM cuts prompts to fill its steps: how, depends on the neighbours, and the tokens must not."""
    prompts = [[3 + (7 * number + seed) % 60 for number in range(40 + 13 * seed)] for seed in range(12)]
    tokens: list[list[tuple[int, ...]]] = []
    for budget in (4096, 64):
        with vllm_stand(tmp_path / str(budget), max_num_batched_tokens=budget) as whole:
            requests = [whole.request(prompt, seed=seed, max_new_tokens=30) for seed, prompt in enumerate(prompts)]
            completions = whole.generate(requests)
            whole.check(completions)
            tokens.append([completion.token_ids for completion in completions])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("stand", [2], indirect=True)
def test_a_rank_that_is_killed_is_named_at_once(stand: VllmStand) -> None:
    """The last test of the two ranks: their engine is of no use afterwards."""

    async def kill() -> tuple[str, float, list[BaseException]]:
        running = asyncio.ensure_future(
            asyncio.gather(
                *(stand.engine.generate(r) for r in long_requests(stand, 4, max_new_tokens=400)), return_exceptions=True
            )
        )
        await asyncio.sleep(0.2)
        (rank,) = (p for p in psutil.Process().children(recursive=True) if p.name() == "VLLM::Worker_TP1")
        rank.send_signal(signal.SIGKILL)
        began = time.monotonic()
        reason = await stand.engine.ended()
        return reason, time.monotonic() - began, await running

    reason, seconds, ends = stand.run(kill())
    assert "rank 1 ended with signal SIGKILL" in reason
    assert seconds < 5
    assert any(isinstance(end, WorkerDied) for end in ends)
    assert all(isinstance(end, Completion | WorkerDied) for end in ends)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        stand.generate([stand.request([5])])
