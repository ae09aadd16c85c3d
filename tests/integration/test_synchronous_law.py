"""``staleness.max: 0`` on one process is the plain synchronous loop, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoTokenizer

from areal.app import resolve, run
from areal.app.resolve import Resolved
from areal.builtins.models.tiny import write_tiny_model
from areal.config import RunConfig, load_recipe
from areal.contracts.messages import Completion, GenerateRequest, Group, Outcome, Trajectory
from areal.contracts.specs import BackendContext, EngineContext, EnvironmentContext
from areal.contracts.transfer import Transfer
from areal.flow.prompts.mixture import Mixture, Source
from areal.flow.rollout.client import ChatCodec, EpisodeClient
from areal.flow.rollout.worker import episode_seed
from areal.flow.trainer.worker import TrainerWorker, TrainRequest
from areal.plugins import discover

STEPS = 20
OVERRIDES = (
    f"training.max_steps={STEPS}",
    "training.batch_size=4",
    "training.warmup.steps=5",
    "algorithm.group_size=4",
    "staleness.max=0",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=0",
    "cluster.name=inline",
    "reshard.name=disk",
    "trackers=[jsonl]",
)


def recipe(runs_dir: Path, model: Path, *more: str) -> RunConfig:
    overrides = (*OVERRIDES, f"runs_dir={runs_dir}", f"model.path={model}", "training.warmup.steps=0", *more)
    return load_recipe(None, overrides, resolve=discover().resolve)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(str(folder), 3)
    return folder


def test_no_staleness_equals_the_plain_loop(tmp_path: Path, model: Path) -> None:
    config = recipe(tmp_path / "flow", model)
    summary = run(config, console=Console(quiet=True))
    (tmp_path / "plain").mkdir()
    expected = asyncio.run(plain_loop(resolve(config, discover()), tmp_path / "plain"))
    ours = load_file(summary.checkpoint / "model.safetensors")
    assert ours.keys() == expected.keys()
    start = load_file(model / "model.safetensors")
    assert any(not ours[name].equal(start[name]) for name in start), "nothing was trained"
    for name, tensor in expected.items():
        assert ours[name].equal(tensor), name


def test_staleness_changes_the_result(tmp_path: Path, model: Path) -> None:
    """The law above could not fail if both sides ignored staleness."""
    runs = [
        run(recipe(tmp_path / str(max_), model, f"staleness.max={max_}"), console=Console(quiet=True))
        for max_ in (0, 2)
    ]
    weights = [load_file(summary.checkpoint / "model.safetensors") for summary in runs]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert max(metrics["staleness/max"] for _, metrics in runs[0].steps) == 0
    assert max(metrics["staleness/max"] for _, metrics in runs[1].steps) > 0


async def plain_loop(resolved: Resolved, folder: Path) -> dict[str, object]:
    """Sample a batch, train on it, copy the weights, repeat; nothing of the flow's control plane."""
    config = resolved.config
    context = BackendContext(
        model=config.model, training=config.training, accelerator=resolved.accelerator, seed=config.seed
    )
    trainer = TrainerWorker(
        resolved.backend.component, resolved.backend.options, context, resolved.algorithm.component,
        resolved.algorithm.options, config.sampling.temperature,
    )  # fmt: skip
    source = trainer.start()
    engine = resolved.engine.component.load()(
        resolved.engine.options,
        EngineContext(model=config.model, accelerator=resolved.accelerator, name="engine", seed=config.seed),
    )
    target = await engine.start()
    resharder = resolved.reshard
    assert resharder is not None
    plan = resharder.component.load()(resharder.options, str(folder)).plan(source, [target])

    async def publish(version: int) -> None:
        for phase in ("stage", "commit"):
            transfer = Transfer(
                phase=phase, version=version, resharder=resharder.component, options=resharder.options, plan=plan
            )
            if phase == "stage":
                trainer.send(transfer)
            await engine.receive(transfer)

    environment = resolved.environments[0]
    tasks = environment.component.load()(
        environment.options, EnvironmentContext(name=environment.name, seed=config.seed)
    )
    prompts = tasks.prompts("train")
    mixture = Mixture([Source(name=environment.name, weight=1.0, num_prompts=len(prompts))], config.seed)
    codec = ChatCodec(AutoTokenizer.from_pretrained(config.model.path))

    async def sample(number: int, index: int, sample_number: int) -> Trajectory:
        async def generate(request: GenerateRequest) -> Completion:
            return await engine.generate(request)

        seed = episode_seed(config.seed, number, sample_number)
        client = EpisodeClient(generate, codec, config.sampling, f"{number}/{sample_number}", seed)
        outcome: Outcome = await tasks.episode(prompts[index], client)
        return Trajectory(group=number, sample=sample_number, turns=tuple(client.turns), outcome=outcome)

    async def batch(step: int) -> Sequence[Group]:
        numbers = range(step * config.training.batch_size, (step + 1) * config.training.batch_size)
        drawn = [(number, mixture.next()[1]) for number in numbers]
        made = await asyncio.gather(
            *(sample(number, index, s) for number, index in drawn for s in range(config.algorithm.group_size))
        )
        return [
            Group(
                number=number,
                prompt=prompts[index],
                trajectories=tuple(trajectory for trajectory in made if trajectory.group == number),
            )
            for number, index in drawn
        ]

    await publish(0)
    for step in range(STEPS):
        trainer.train(TrainRequest(step=step + 1, version=step, groups=tuple(await batch(step))))
        await publish(step + 1)
    await engine.close()
    trainer.save(str(folder / "end"))
    return load_file(folder / "end" / "model" / "model.safetensors")
