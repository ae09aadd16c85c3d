"""Tiny random models for tests of engines and backends, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Arch = Literal["qwen3", "llama", "qwen2", "gpt2"]

PAD, BOS, EOS = 0, 1, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
    },
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""What other families do besides, in the words of their configurations, so strongly that logits show it."""
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=().,:;?!"


def tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    tied: bool = True,
    arch: Arch = "qwen3",
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 64,
    positions: int = 512,
) -> str:
    """Write a random float32 model with character tokenizer to `path` and return it."""
    model = tiny_module(seed=seed, tied=tied, arch=arch, hidden=hidden, layers=layers, vocab=vocab, positions=positions)
    model.generation_config.update(eos_token_id=EOS, bos_token_id=BOS, pad_token_id=PAD)
    model.save_pretrained(path)
    character_tokenizer(vocab).save_pretrained(path)
    return str(path)


def tiny_module(
    *,
    seed: int = 0,
    tied: bool = True,
    arch: Arch = "qwen3",
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 64,
    positions: int = 512,
) -> Any:
    """Return the transformers module that `tiny_model` would write, in eval mode.

    `hidden` must be a multiple of 64: heads are 32 wide, so that vLLM and SGLang serve the model too, and two query
    heads share one key-value head (GPT-2 has no sharing). Ids 0, 1, 2 are pad, begin and end of sequence. The
    weights are large enough (standard deviation 0.15) that context, position and mask matter to the logits.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(arch, hidden=hidden, layers=layers, vocab=vocab, positions=positions, tied=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).float().eval()


def family_model(path: str | Path, family: str, **config: Any) -> str:
    """Write what `family_module` returns to `path`, without a tokenizer, and return it."""
    family_module(family, **config).save_pretrained(path)
    return str(path)


def family_module(family: str, **config: Any) -> Any:
    """Return a random float32 model of any Hugging Face model type, the same each time, in training mode.

    `config`: what its configuration is to say besides `FAMILIES`, or in place of the sizes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    asked = AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {}), **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(asked).float()


def character_tokenizer(vocab: int = 64) -> Any:
    """Return a transformers tokenizer in which every character is a token; unknown ones become pad."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL, *_CHARACTERS][:vocab]
    names += [f"<extra_{i}>" for i in range(len(names), vocab)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=_SPECIAL[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_SPECIAL[PAD], bos_token=_SPECIAL[BOS], eos_token=_SPECIAL[EOS]
    )


def _config(arch: Arch, *, hidden: int, layers: int, vocab: int, positions: int, tied: bool) -> Any:
    from transformers import AutoConfig

    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": tied}
    heads = hidden // 32
    if arch == "gpt2":
        sizes: dict[str, Any] = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    else:
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": 32,
            "max_position_embeddings": positions,
        }
    return AutoConfig.for_model(arch, vocab_size=vocab, initializer_range=0.15, **sizes, **special)
