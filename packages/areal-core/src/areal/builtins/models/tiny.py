"""The bundled tiny model: made from a seed in milliseconds, so that a first run needs no model hub."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal.builtins.quiet import no_progress_bar

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNKNOWN = range(4)
"""Token ids of the special tokens."""
WIDTH = 288
"""Of a dense layer's MLP."""
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def write_tiny_model(folder: str | Path, seed: int, num_experts: int = 0, top_k: int = 0) -> str:
    """Write a random Qwen3-type model of 0.4 M parameters with a character tokenizer as an HF folder.

    `num_experts`, `top_k`: experts of each layer and of each token, who together are about as wide as a dense layer; 0:
    a dense model. head_dim is 32 because the attention kernels of vLLM and SGLang ask for it. torch's global random
    state stays as it was.

    Returns `folder` as text.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(num_experts, top_k), dtype=torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    with no_progress_bar():
        model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_config(num_experts: int = 0, top_k: int = 0) -> Qwen3Config | Qwen3MoeConfig:
    """Return the architecture.

    Narrow and three layers deep: of the shapes of this size it learns to reverse digits most evenly over seeds.
    """
    sizes: dict[str, Any] = {
        "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
        "hidden_size": 96,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if not num_experts:
        return Qwen3Config(**sizes)
    width = max(16, WIDTH // top_k // 16 * 16)
    return Qwen3MoeConfig(
        **sizes, num_experts=num_experts, num_experts_per_tok=top_k, moe_intermediate_size=width, norm_topk_prob=True
    )


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each printable ASCII character; anything else is ``<unk>``.

    ``<bos>`` goes before every text that is encoded with special tokens.
    """
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    pad, bos, eos, unknown = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    # "[\s\S]" rather than ".", which does not match a line break.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        model_max_length=2048,
        padding_side="left",
    )
