"""What a model's folder says about its weights and its ends, read without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from areal.contracts.hf_config import hf_config
from areal.errors import WorkerFailed

_NO_PARAMETERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of buffers that old checkpoints hold; no trainer sends them."""


def folder_of(path: str) -> str:
    """Return the folder of a model: `path` itself, or where the hub's copy of that id lies. WorkerFailed."""
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise WorkerFailed(
            f"model.path {path!r} is not a folder here and could not be fetched as a hub id ({said}); "
            "give the path of a Hugging Face folder"
        ) from error


def held_tensors(folder: str, dtype: str) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by HF name, as meta tensors in `dtype`; tied names share one.

    Raises WorkerFailed when the folder has no readable safetensors file.
    """
    paths = sorted(Path(folder).glob("*.safetensors"))
    target = getattr(torch, dtype)
    held: dict[str, Tensor] = {}
    try:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith(_NO_PARAMETERS):
                        shape = file.get_slice(name).get_shape()
                        held[name] = torch.empty(shape, dtype=target, device="meta")
    except Exception as error:
        raise WorkerFailed(f"cannot read the weights in {folder!r} ({error}); give a Hugging Face folder") from error
    if not held:
        raise WorkerFailed(f"{folder!r} holds no safetensors file; weight updates need one to know what belongs to it")
    if (hf_config(folder) or {}).get("tie_word_embeddings"):
        embedding = next((name for name in held if name.endswith("embed_tokens.weight")), None)
        if embedding is not None:
            held["lm_head.weight"] = held[embedding]
    return held


def stop_ids(folder: str) -> frozenset[int]:
    """Return the ids that always end a completion: the generation config's EOS, or else the tokenizer's."""
    eos = _generation_config(folder).get("eos_token_id")
    if eos is None:
        eos = (hf_config(folder) or {}).get("eos_token_id")
    if eos is None and Path(folder, "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        try:
            eos = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
        except (OSError, ValueError, KeyError):
            eos = None  # only the request's own stop tokens end it
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])


def _generation_config(folder: str) -> dict[str, Any]:
    try:
        return json.loads(Path(folder, "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
