"""The supervised warm-up's updates, and the numbers of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_samples import handle_of, make_group, make_trajectory

from areal.contracts.component import Component
from areal.contracts.messages import Outcome, Trajectory
from areal.contracts.specs import WarmupSpec
from areal.errors import ConfigError
from areal.flow.trainer.metrics import summarise
from areal.flow.trainer.warmup import warm_up
from areal.flow.trainer.worker import Demonstration

SFT = Component(name="sft", factory="nowhere:Nothing")


class Trainer:
    def __init__(self) -> None:
        self.calls: list[tuple[list[Demonstration], Component, float]] = []

    def warm_up(self, demonstrations: list[Demonstration], algorithm: Component, rate: float) -> float:
        self.calls.append((demonstrations, algorithm, rate))
        return 1.0 / len(self.calls)


async def test_the_rate_rises_and_stays() -> None:
    trainer, told, asked = Trainer(), [], []

    async def demonstrate(num: int) -> list[Demonstration]:
        asked.append(num)
        return [((len(asked),), (2,))]

    spec = WarmupSpec(steps=6, batch_size=32, learning_rate=0.4)
    await warm_up(
        handle_of("trainer-0", trainer), demonstrate, spec, SFT, lambda step, loss: told.append((step, loss)), 60.0
    )
    assert [rate for _, _, rate in trainer.calls] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert [demonstrations for demonstrations, _, _ in trainer.calls] == [[((number,), (2,))] for number in range(1, 7)]
    assert asked == [32] * 6 and all(algorithm == SFT for _, algorithm, _ in trainer.calls)
    assert told == [(step, 1.0 / step) for step in range(1, 7)]
    await warm_up(handle_of("t", trainer), demonstrate, replace(spec, steps=1), SFT, lambda *_: None, 60.0)
    assert trainer.calls[-1][2] == pytest.approx(0.4)


async def test_no_steps_do_nothing() -> None:
    async def demonstrate(num: int) -> list[Demonstration]:
        raise AssertionError

    await warm_up(handle_of("t", Trainer()), demonstrate, WarmupSpec(), SFT, lambda *_: None, 60.0)


async def test_prompts_without_answers() -> None:
    async def demonstrate(num: int) -> list[Demonstration]:
        return []

    with pytest.raises(ConfigError, match=r"the environments have none; set training\.warmup\.steps to 0"):
        await warm_up(handle_of("t", Trainer()), demonstrate, WarmupSpec(steps=1), SFT, lambda *_: None, 60.0)


def failed(sample: int, outcome: Outcome) -> Trajectory:
    return Trajectory(group=0, sample=sample, turns=(), outcome=outcome)


def test_a_batch_in_numbers() -> None:
    scored = Trajectory(group=1, sample=0, turns=make_trajectory(1, 0).turns, outcome=Outcome.scored(0.5, accuracy=1.0))
    also = Trajectory(group=1, sample=1, turns=(), outcome=Outcome.scored(-1.5, accuracy=0.0, length=3.0))
    groups = [
        make_group(0, [failed(0, Outcome.error("x")), failed(1, Outcome.timeout("y")), make_trajectory(0, 2)]),
        make_group(1, [scored, also]),
    ]
    assert summarise(groups) == {
        "rollout/trajectories": 5.0,
        "rollout/errors": 1.0,
        "rollout/timeouts": 1.0,
        "rollout/tokens": 4.0,
        "reward/mean": 0.0,
        "reward/min": -1.5,
        "reward/max": 1.0,
        "task/accuracy": 0.5,
        "task/length": 3.0,
    }


def test_failures_alone_have_no_reward() -> None:
    metrics = summarise([make_group(0, [failed(0, Outcome.error("x"))])])
    assert "reward/mean" not in metrics and metrics["rollout/errors"] == 1.0
