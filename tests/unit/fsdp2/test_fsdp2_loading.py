"""Loading by slices: other families, other files, and what is refused in one sentence; one rank in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal.algorithms.sft import Sft
from areal.builtins.torch_backend.backend import TorchBackend
from areal.contracts.specs import AmpSpec, BackendContext, ModelSpec, TrainingSpec
from areal.errors import WorkerFailed
from areal.testing.backend_fixtures import batch_of, sample_rows
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import FAMILIES, family_model, tiny_model
from areal_fsdp2.backend import Fsdp2Backend

BATCH = batch_of(sample_rows())


@pytest.fixture
def start() -> Iterator[Callable[..., Fsdp2Backend]]:
    """Return the function that starts a backend of one rank; all are closed in the end."""
    made: list[Fsdp2Backend] = []

    def started(path: str, **more: Any) -> Fsdp2Backend:
        made.append(Fsdp2Backend(None, context(path, **more)))
        made[-1].start()
        return made[-1]

    yield started
    for backend in made:
        backend.close()


def context(path: str, role: Literal["actor", "critic"] = "actor", **training: Any) -> BackendContext:
    spec = TrainingSpec(**training)
    return BackendContext(model=ModelSpec(path=path), training=spec, accelerator=HostCpu(), seed=0, role=role)


@pytest.mark.parametrize("arch", list(FAMILIES))
def test_other_families_give_the_numbers_of_the_single_device_backend(
    arch: str, start: Callable[..., Fsdp2Backend], tmp_path: Path
) -> None:
    path = family_model(tmp_path, arch)
    truth = TorchBackend(None, context(path))
    truth.start()
    backend = start(path)
    for mine, theirs in zip(backend.logprobs(BATCH), truth.logprobs(BATCH), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    mine, theirs = backend.train_step(BATCH, Sft()), truth.train_step(BATCH, Sft())
    assert mine == pytest.approx(theirs, rel=1e-4)
    with_files = load_file(tmp_path / "model.safetensors")
    assert {spec.name: spec.shape for spec in backend.layout().tensors} == {n: t.shape for n, t in with_files.items()}


def test_a_family_without_a_plan_trains_in_low_precision_too(
    start: Callable[..., Fsdp2Backend], tmp_path: Path
) -> None:
    backend = start(family_model(tmp_path, "granite"), amp=AmpSpec(enabled=True, dtype="bf16"))
    assert backend.train_step(BATCH, Sft())["skipped"] == 0


def test_files_may_be_many_and_in_another_dtype(start: Callable[..., Fsdp2Backend], tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "plain")
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    module.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert len([*(tmp_path / "cut").glob("*.safetensors")]) > 3
    mine, theirs = start(str(tmp_path / "cut")).logprobs(BATCH), start(path).logprobs(BATCH)
    for found, expected in zip(mine, theirs, strict=True):
        assert found == pytest.approx(expected, abs=0.5) and found != expected


def cut_weights(folder: Path) -> str:
    weights = Path(tiny_model(folder)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(folder)


def a_missing_tensor(folder: Path) -> str:
    weights = Path(tiny_model(folder)) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights)
    return str(folder)


def another_shape(folder: Path) -> str:
    weights = Path(tiny_model(folder)) / "model.safetensors"
    save_file({**load_file(weights), "model.norm.weight": torch.ones(7)}, weights)
    return str(folder)


def no_weights(folder: Path) -> str:
    (Path(tiny_model(folder)) / "model.safetensors").unlink()
    return str(folder)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: "", "model.path is empty"),
        (lambda folder: str(folder / "nothing-here"), "is not a folder here"),
        (str, "cannot load a causal language model"),
        (no_weights, r"it has no \*.safetensors file"),
        (cut_weights, "cannot read the weights"),
        (a_missing_tensor, "it has no tensor model.norm.weight"),
        (another_shape, r"model.norm.weight has shape \(7,\), not \(64,\)"),
        (lambda folder: family_model(folder, "mamba", state_size=8), "off by"),
        (lambda folder: family_model(folder, "gemma2", query_pre_attn_scalar=16), "capped scores"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(
    make: Callable[[Path], str], words: str, start: Callable[..., Fsdp2Backend], tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(WorkerFailed, match=words) as caught:
        start(path)
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_a_critic_takes_a_head_that_the_folder_has(start: Callable[..., Fsdp2Backend], tmp_path: Path) -> None:
    path = Path(tiny_model(tmp_path))
    tensors = load_file(path / "model.safetensors")
    head = {"score.weight": torch.full((1, 64), 0.1), "score.bias": torch.tensor([2.0])}
    save_file({**tensors, **head}, path / "model.safetensors")
    values = [v for row in start(str(path), role="critic").values(BATCH) for v in row if v]
    assert len(values) == BATCH.num_tokens and sum(values) / len(values) != pytest.approx(0.0, abs=0.1)
