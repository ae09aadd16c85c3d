"""The models of train_vs_trl.py: published shapes, random weights, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from areal.testing.models import BOS, EOS, PAD, character_tokenizer
from measuring.sync_models import SIZES

SPREADS = {"tiny": 0.15}
"""Standard deviation of a size's weights where it is not 0.02: context must matter even where layers are few."""
POSITIONS = 8192


def write_model(size: str, folder: Path, seed: int) -> str:
    """Write a float32 model of one of `SIZES` with a tokenizer, which nobody's tokens are of, and return its folder."""
    shape = SIZES[size]
    config = AutoConfig.for_model(
        "qwen3" if shape.has_head_norms else "llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=SPREADS.get(size, 0.02),
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
    disable_progress_bar()
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)
