"""Pipeline stages and spread experts in the backend: the same numbers and the same update as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from areal.algorithms.grpo import Grpo
from areal.builtins.torch_backend.backend import TorchBackend
from areal.builtins.torch_backend.options import TorchBackendOptions
from areal.contracts.backend import Backend
from areal.contracts.specs import BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal.testing.backend_fixtures import HostCpu, batch_of, sample_rows
from areal.testing.backend_ranks import RankedBackends
from areal.testing.models import tiny_model
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.hooks import areal_backends
from areal_fsdp2.options import Fsdp2Options

ADAM_EPS = 0.01
"""So large that the update does not blow up the rounding of small gradients."""


class Outcome:
    """What a backend makes of two updates. Invariant: `weights` are those of the folder that it writes."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        backend.start()
        batch = batch_of(sample_rows())
        self.logprobs = backend.logprobs(batch)
        self.statistics = [dict(backend.train_step(batch_of(sample_rows(seed)), Grpo())) for seed in range(2)]
        self.afterwards = backend.logprobs(batch)
        backend.save(str(folder))
        self.weights = load_file(folder / "model" / "model.safetensors")


def context_of(path: str, **training: Any) -> BackendContext:
    return BackendContext(
        model=ModelSpec(path=path),
        training=TrainingSpec(micro_batch_tokens=90, learning_rate=1e-2, weight_decay=0.1, grad_clip=0.05, **training),
        accelerator=HostCpu(),
        seed=0,
    )


@pytest.fixture(scope="module")
def models(moe_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return folders of tiny models by name."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "tied", layers=3, vocab=64)
    tiny_model(folder / "untied", layers=4, vocab=64, tied=False)
    return {"moe": moe_path, **{name: str(folder / name) for name in ("tied", "untied")}}


@pytest.fixture(scope="module")
def alone(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return what one device makes of each model."""
    folder = tmp_path_factory.mktemp("alone")
    options = TorchBackendOptions(adam_eps=ADAM_EPS)
    return {name: Outcome(TorchBackend(options, context_of(path)), folder / name) for name, path in models.items()}


@pytest.fixture(scope="module")
def four() -> Iterator[RankedBackends]:
    ranks = RankedBackends(4, TrainerDevices(world_size=4, per_node=4))
    yield ranks
    ranks.close()


MESHES = [
    ("moe", {"tp": 1, "ep": 4}),
    ("moe", {"tp": 1, "ep": 2}),
    ("moe", {"tp": 1, "ep": 2, "replicate": 2}),
    ("moe", {"tp": 1, "pp": 2, "ep": 2}),
    ("moe", {"tp": 2, "ep": 2}),
    ("tied", {"pp": 2}),
    ("untied", {"pp": 2}),
    ("untied", {"pp": 4}),
]


@pytest.mark.parametrize(("name", "options"), MESHES)
def test_the_update_is_that_of_one_device(
    four: RankedBackends,
    models: dict[str, str],
    alone: dict[str, Outcome],
    tmp_path: Path,
    name: str,
    options: dict[str, int],
) -> None:
    (component,) = areal_backends()
    backend = four.make(component, {**options, "adam_eps": ADAM_EPS}, context_of(models[name]))
    try:
        found, right = Outcome(backend, tmp_path), alone[name]
    finally:
        four.drop()
    for ours, theirs in ((found.logprobs, right.logprobs), (found.afterwards, right.afterwards)):
        assert [x for row in ours for x in row] == pytest.approx([x for row in theirs for x in row], abs=2e-5)
    for mine, theirs in zip(found.statistics, right.statistics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert found.weights.keys() == right.weights.keys()
    for key, weight in right.weights.items():
        assert float((found.weights[key] - weight).abs().max()) < 1e-5, key


@pytest.mark.parametrize(("name", "options"), [("tied", {"pp": 2}), ("moe", {"tp": 2, "ep": 2})])
def test_one_rank_goes_on_from_their_checkpoint(
    four: RankedBackends, models: dict[str, str], tmp_path: Path, name: str, options: dict[str, int]
) -> None:
    (component,) = areal_backends()
    many = four.make(component, {**options, "adam_eps": ADAM_EPS}, context_of(models[name]))
    one = Fsdp2Backend(Fsdp2Options(adam_eps=ADAM_EPS), context_of(models[name]))
    try:
        Outcome(many, tmp_path)
        one.start()
        one.load(str(tmp_path))
        for step in range(2, 4):
            batch = batch_of(sample_rows(step))
            assert one.train_step(batch, Grpo()) == pytest.approx(many.train_step(batch, Grpo()), rel=1e-4, abs=1e-5)
        for mine, theirs in zip(one.logprobs(batch), many.logprobs(batch), strict=True):
            assert mine == pytest.approx(theirs, abs=2e-5)
    finally:
        one.close()
        four.drop()
