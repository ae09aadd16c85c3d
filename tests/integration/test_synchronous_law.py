"""``staleness.max: 0`` on one process is the plain synchronous loop, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from areal.app import resolve, run
from areal.app.resolve import Resolved
from areal.builtins.models.tiny import write_tiny_model
from areal.config import RunConfig, load_recipe
from areal.contracts.messages import Group, Trajectory
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


def recipe(runs_dir: Path, model: Path, *more: str, algorithm: str = "grpo") -> RunConfig:
    overrides = (*OVERRIDES, f"runs_dir={runs_dir}", f"model.path={model}", "training.warmup.steps=0", *more)
    return load_recipe(None, overrides, {"algorithm": algorithm}, resolve=discover().resolve)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(str(folder), 3)
    return folder


ALGORITHMS = sorted(discover().offers("algorithm").keys() - {"grpo"})
WITH_OPTIONS = [
    ("grpo", ["algorithm.kl_coefficient=0.1", "training.minibatches=2"]),
    ("grpo", ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"]),
    ("grpo", ["algorithm.proximal=loglinear", "training.minibatches=2"]),
    ("ppo", ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "training.minibatches=2"]),
    ("dpo", ["training.minibatches=2"]),
]


@pytest.mark.parametrize(
    ("name", "steps", "options"),
    [
        ("grpo", STEPS, []),
        # The plain loop takes every group.
        *((name, 4, ["algorithm.dynamic_sampling=false"] if name == "dapo" else []) for name in ALGORITHMS),
        *((name, 4, options) for name, options in WITH_OPTIONS),
    ],
)
def test_no_staleness_equals_the_plain_loop(
    tmp_path: Path, model: Path, name: str, steps: int, options: list[str]
) -> None:
    config = recipe(tmp_path / "flow", model, f"training.max_steps={steps}", *options, algorithm=name)
    summary = run(config, console=Console(quiet=True))
    (tmp_path / "plain").mkdir()
    expected = asyncio.run(PlainLoop(resolve(config, discover()), tmp_path / "plain").run())
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


class PlainLoop:
    """Sample a batch, train on it, copy the weights, repeat; nothing of the flow's control plane."""

    def __init__(self, resolved: Resolved, folder: Path) -> None:
        config = resolved.config
        self.resolved, self.config, self.folder = resolved, config, folder
        context = BackendContext(
            model=config.model, training=config.training, accelerator=resolved.accelerator, seed=config.seed
        )
        algorithm, backend = resolved.algorithm, resolved.backend
        self.trainer = TrainerWorker(
            backend.component,
            backend.options,
            context,
            algorithm.component,
            algorithm.options,
            config.sampling.temperature,
        )
        self.engine = resolved.engine.component.load()(
            resolved.engine.options,
            EngineContext(model=config.model, accelerator=resolved.accelerator, name="engine", seed=config.seed),
        )
        choice = resolved.environments[0]
        self.tasks = choice.component.load()(choice.options, EnvironmentContext(name=choice.name, seed=config.seed))
        self.prompts = self.tasks.prompts("train")
        source = Source(name=choice.name, weight=1.0, num_prompts=len(self.prompts))
        self.mixture = Mixture([source], config.seed)
        self.codec = ChatCodec(AutoTokenizer.from_pretrained(config.model.path))

    async def run(self) -> dict[str, Tensor]:
        self.trainer.make()
        source, target = self.trainer.start(), await self.engine.start()
        resharder = self.resolved.reshard
        assert resharder is not None
        plan = resharder.component.load()(resharder.options, str(self.folder)).plan(source, [target])
        common = {"resharder": resharder.component, "options": resharder.options, "plan": plan}
        num_steps = self.config.training.max_steps
        for step in range(num_steps + 1):
            staging = Transfer(phase="stage", version=step, **common)
            self.trainer.begin_send(staging)
            await self.trainer.finish_send()
            await self.engine.receive(staging)
            await self.engine.receive(Transfer(phase="commit", version=step, **common))
            if step < num_steps:
                groups = tuple(await self.batch(step))
                self.trainer.train(TrainRequest(step=step + 1, version=step, groups=groups))
        await self.engine.close()
        self.trainer.save(str(self.folder / "end"))
        return load_file(self.folder / "end" / "model" / "model.safetensors")

    async def batch(self, step: int) -> list[Group]:
        numbers = range(step * self.config.training.batch_size, (step + 1) * self.config.training.batch_size)
        drawn = {number: self.mixture.next()[1] for number in numbers}
        samples = range(self.config.algorithm.group_size)
        made = await asyncio.gather(*(self.sample(n, index, s) for n, index in drawn.items() for s in samples))
        return [
            Group(number=n, prompt=self.prompts[index], trajectories=tuple(t for t in made if t.group == n))
            for n, index in drawn.items()
        ]

    async def sample(self, number: int, index: int, sample: int) -> Trajectory:
        seed = episode_seed(self.config.seed, number, sample)
        uid = f"{number}/{sample}"
        client = EpisodeClient(self.engine.generate, self.codec, self.config.sampling, uid, seed)
        outcome = await self.tasks.episode(self.prompts[index], client)
        return Trajectory(group=number, sample=sample, turns=tuple(client.turns), outcome=outcome)
