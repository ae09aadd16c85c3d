"""Loading: what cannot be run is refused in one sentence that names the path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BertConfig, MambaConfig, MistralConfig, Qwen2Config, T5Config

from areal.builtins.transformers_engine.loading import load_model, refuse_config, stop_ids
from areal.builtins.transformers_engine.model import CausalModel
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.contracts.specs import ModelSpec
from areal.errors import WorkerFailed
from areal.testing.models import EOS, tiny_model


def refused(path: str | Path, dtype: Any = "float32") -> str:
    with pytest.raises(WorkerFailed) as caught:
        CausalModel(ModelSpec(path=str(path), dtype=dtype), "cpu", TransformersEngineOptions())
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "not a folder here" in refused(tmp_path / "nothing")


def test_no_path_at_all() -> None:
    assert "model.path is empty" in refused("")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "cannot load a causal language model" in refused(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    Path(tiny_model(tmp_path), "model.safetensors").unlink()
    assert "cannot load a causal language model" in refused(tmp_path)


def test_a_truncated_weights_file(tmp_path: Path) -> None:
    weights = Path(tiny_model(tmp_path), "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot load a causal language model" in refused(tmp_path)


def test_a_model_type_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "no_such_model" in refused(tmp_path)


def test_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"model\.dtype is 'float7'"):
        load_model(ModelSpec(path=tiny_model(tmp_path), dtype="float7"), "cpu", "sdpa")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=128), "sliding window of 128"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=2, num_hidden_layers=4), "sliding_attention"),
        (T5Config(), "encoder-decoder"),
    ],
)
def test_configurations_whose_cache_is_of_another_kind(config: Any, reason: str) -> None:
    with pytest.raises(WorkerFailed, match=reason):
        refuse_config(config, "somewhere")


def test_full_attention_is_accepted() -> None:
    refuse_config(MistralConfig(sliding_window=None), "somewhere")
    refuse_config(Qwen2Config(), "somewhere")


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=32, state_size=4),
        BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=32,
            initializer_range=0.1,
        ),
    ],
)
def test_models_that_are_not_causal_transformers(tmp_path: Path, config: Any) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "cannot run the model" in refused(tmp_path)


def test_parameters_get_the_asked_dtype_and_the_rotary_buffers_keep_theirs(tmp_path: Path) -> None:
    model = load_model(ModelSpec(path=tiny_model(tmp_path), dtype="bfloat16"), "cpu", "sdpa")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert not model.training


@pytest.mark.parametrize(("eos", "expected"), [(5, {5}), ([4, 6], {4, 6}), (None, {EOS})])
def test_stop_ids_come_from_the_generation_config_or_else_the_tokenizer(
    tmp_path: Path, eos: Any, expected: set[int]
) -> None:
    path = tiny_model(tmp_path)
    model = load_model(ModelSpec(path=path), "cpu", "sdpa")
    assert model.generation_config is not None
    model.generation_config.eos_token_id = eos
    assert stop_ids(model, path) == expected


def test_a_model_without_any_end_token_has_no_stop_ids(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    model = load_model(ModelSpec(path=path), "cpu", "sdpa")
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    assert stop_ids(model, path) == frozenset()


def test_the_config_is_read_without_weights(tmp_path: Path) -> None:
    # A model of an unsupported kind is refused before its weights, which may be large, are read.
    path = Path(tiny_model(tmp_path))
    config = AutoConfig.from_pretrained(path)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.save_pretrained(path)
    (path / "model.safetensors").unlink()
    assert "sliding_attention" in refused(path)
