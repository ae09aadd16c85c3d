"""The bundled tiny model and its character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from areal.builtins.models.tiny import CHARACTERS, character_tokenizer, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), seed=3)


def test_it_is_an_ordinary_hf_folder(folder: str):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 300_000 <= sum(p.numel() for p in model.parameters()) <= 600_000
    assert model.config.head_dim == 32 and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert json.loads(Path(folder, "config.json").read_text())["model_type"] == "qwen3"


def test_it_may_have_experts(tmp_path: Path):
    path = write_tiny_model(tmp_path, seed=3, num_experts=4, top_k=2)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (4, 2)
    assert model.config.moe_intermediate_size * 2 == 288
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens = torch.arange(1, 9)[None]
    assert torch.isfinite(model(tokens).logits).all()


def test_the_seed_decides_the_weights_and_nothing_else_changes(folder: str, tmp_path: Path):
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    again = write_tiny_model(tmp_path / "again", seed=3)
    assert torch.equal(torch.rand(3), expected)
    other = write_tiny_model(tmp_path / "other", seed=4)
    first, same, different = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, again, other)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], different["model.embed_tokens.weight"])


def test_every_character_is_a_token(folder: str):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("12=\n aZ~").input_ids
    assert ids[0] == tokenizer.bos_token_id and len(ids) == 9
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12=\n aZ~"
    text = "".join(CHARACTERS)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(set(ids)) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer("é", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]


def test_special_tokens_differ():
    tokenizer = character_tokenizer()
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert sorted(special) == [0, 1, 2, 3]


def test_it_generates_from_left_padded_prompts(folder: str):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["12=", "3456="], return_tensors="pt", padding=True)
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]
    output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert output.shape[0] == 2 and output.shape[1] <= 9
