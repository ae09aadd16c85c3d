"""``staleness.on_excess: mask``: a token that is too old has no part in the gradient, with the real backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.contracts.messages import Completion, Group, Outcome, Prompt, Trajectory
from areal.contracts.specs import BackendContext, ModelSpec, TrainingSpec
from areal.flow.trainer.worker import TrainerWorker, TrainRequest
from areal.plugins import discover
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model


def trainer(path: str, algorithm: str) -> TrainerWorker:
    plugins = discover()
    backend, chosen = plugins.resolve("backend", "torch"), plugins.resolve("algorithm", algorithm)
    assert backend is not None and chosen is not None
    context = BackendContext(
        model=ModelSpec(path=path), training=TrainingSpec(learning_rate=1e-3), accelerator=HostCpu(), seed=0
    )
    worker = TrainerWorker(
        backend, backend.parse_options({}), context, chosen, chosen.parse_options({}), temperature=1.0
    )
    worker.make()
    worker.start()
    return worker


def groups(old_logprob: float) -> tuple[Group, ...]:
    """Return one group whose answers begin with two tokens of version 0 and end with two of version 3."""

    def trajectory(sample: int) -> Trajectory:
        turn = Completion(
            uid="",
            prompt_ids=(1, 9),
            token_ids=(5 + sample, 6, 7, 8),
            logprobs=(old_logprob, old_logprob, -4.0, -4.1),
            versions=(0, 0, 3, 3),
            finish_reason="stop",
        )
        return Trajectory(group=0, sample=sample, turns=(turn,), outcome=Outcome.scored(float(sample == 0)))

    prompt = Prompt(environment="e", index=0, messages=())
    return (Group(number=0, prompt=prompt, trajectories=tuple(trajectory(sample) for sample in range(3))),)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "ppo"])
def test_the_update_does_not_depend_on_masked_tokens(tmp_path: Path, algorithm: str) -> None:
    path = tiny_model(tmp_path)
    probe = groups(-1.0)[0].trajectories[0].turns[0]

    def after(old_logprob: float, oldest: int | None) -> tuple[dict[str, float], Any]:
        worker = trainer(path, algorithm)
        request = TrainRequest(step=4, version=3, groups=groups(old_logprob), oldest_version=oldest)
        metrics = worker.train(request)
        del metrics["time/train_s"]
        # How far this one completion's logprobs have moved says what the weights are.
        return metrics, worker.parity([replace(probe, logprobs=(-4.0,) * 4)])

    masked = after(-4.0, 1)
    assert masked[0]["staleness/masked_tokens"] == 6 and masked[0]["train/grad_norm"] > 0
    assert after(-2.0, 1) == masked
    assert after(-2.0, None) != after(-4.0, None), "and without the mask it does"
