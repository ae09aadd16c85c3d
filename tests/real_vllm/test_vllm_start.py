"""What vLLM refuses at its start is said in one sentence: its own, or ours where it has none."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm_stands import make_engine

from areal.contracts.messages import Sampling
from areal.errors import ArealError, ConfigError, WorkerFailed
from areal.testing.models import tiny_model
from areal_vllm import calls
from areal_vllm.options import VllmOptions


def refused(model: str, log_dir: str = "", **options: Any) -> str:
    async def start() -> None:
        engine = make_engine(model, log_dir=log_dir, **options)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ArealError) as caught:
        asyncio.run(start())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 16, which vLLM's attention has no kernel for on a CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, eos_token_id=2,
    )  # fmt: skip
    folder = str(tmp_path_factory.mktemp("models") / "odd")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_an_option_that_vllm_does_not_know(model: str) -> None:
    assert "'max_num_seq'" in refused(model, max_num_seq=4)
    assert "did you mean 'max_num_seqs'?" in refused(model, max_num_seq=4)


def test_a_value_that_vllm_refuses(model: str) -> None:
    said = refused(model, gpu_memory_utilization=7.0)
    assert "gpu_memory_utilization" in said or "less than or equal to 1" in said


def test_a_model_that_vllm_cannot_run(odd_model: str) -> None:
    assert "head_dim=16" in refused(odd_model)


def test_a_rank_in_another_process_says_why(odd_model: str, tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    saved = os.dup(1), os.dup(2)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)  # as a worker of the cluster does with all it prints
    os.dup2(descriptor, 2)
    try:
        said = refused(odd_model, log_dir=str(tmp_path), tensor_parallel_size=2)
    finally:
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(descriptor)
    assert "vLLM did not start with the model" in said
    assert "head_dim=16" in said


def test_a_cache_that_is_too_small(model: str) -> None:
    assert "memory" in refused(model, kv_cache_memory_bytes=1000).lower()


def test_more_ranks_than_heads(model: str) -> None:
    assert "divisible" in refused(model, tensor_parallel_size=3)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors file" in refused(str(tmp_path))


def test_damaged_weights(model: str, tmp_path: Path) -> None:
    for path in Path(model).iterdir():
        (tmp_path / path.name).write_bytes(
            path.read_bytes()[:200] if path.suffix == ".safetensors" else path.read_bytes()
        )
    assert "cannot read the weights" in refused(str(tmp_path))


def test_another_version_of_vllm(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TESTED", ((0, 90, 0), (0, 91, 0)))
    with pytest.raises(ConfigError, match=r"is installed, and areal-vllm is tested with 0\.90\.0 and newer"):
        make_engine(model)


def test_an_engine_takes_no_requests_before_it_has_started(model: str) -> None:
    engine = make_engine(model)
    with pytest.raises(WorkerFailed, match="is not running"):
        asyncio.run(engine.pause())
    assert engine.load() == {}


@pytest.mark.parametrize(
    "key", ["model", "dtype", "seed", "logprobs_mode", "async_scheduling", "stream_interval", "data_parallel_size"]
)
def test_what_the_recipe_says_elsewhere_is_no_option(key: str) -> None:
    with pytest.raises(ValidationError, match="cannot be set here"):
        VllmOptions.model_validate({key: "x"})


def test_a_misspelt_option_of_ours(model: str) -> None:
    assert "did you mean 'kv_on_update'?" in refused(model, kv_on_updat="keep")


@pytest.mark.parametrize("temperature", [1e-5, 0.009, 2.1, 5.0])
def test_a_temperature_that_vllm_does_not_have(temperature: float) -> None:
    with pytest.raises(ArealError, match=r"vLLM samples at 0\.01 to 2"):
        calls.sampling_params(Sampling(temperature=temperature), 0, frozenset(), 64)


def test_unknown_keys_are_vllms() -> None:
    options = VllmOptions.model_validate({"max_num_seqs": 7, "kv_on_update": "recompute"})
    assert options.arguments == {"max_num_seqs": 7}
