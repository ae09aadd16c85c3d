"""Loading a model folder, and refusing in one sentence what the engine cannot run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from areal.builtins.loading import LOADING_ERRORS, first_line
from areal.contracts.specs import ModelSpec
from areal.errors import WorkerFailed


def load_model(spec: ModelSpec, device: str, attention: str) -> PreTrainedModel:
    """Return the model in eval mode on `device`, every parameter in the spec's dtype; WorkerFailed."""
    if not spec.path:
        raise WorkerFailed("the engine has no model: model.path is empty; give a Hugging Face folder or hub id")
    # A folder is never looked up on the network.
    source: dict[str, Any] = {"local_files_only": Path(spec.path).is_dir()}
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WorkerFailed(f"model.dtype is {spec.dtype!r}; use float32, bfloat16 or float16")
    try:
        config = AutoConfig.from_pretrained(spec.path, **source)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(spec.path, error) from error
    refuse_config(config, spec.path)
    progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            spec.path, config=config, dtype=dtype, attn_implementation=attention, **source
        )
        nn.Module.to(model, device)
    except LOADING_ERRORS as error:
        raise _unreadable(spec.path, error) from error
    finally:
        if progress_bar:
            logging.enable_progress_bar()
    # Some models keep a few layers in float32; weight updates come in one dtype.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise _unsupported(spec.path, f"{type(model).__name__} takes no position_ids")
    if model.get_output_embeddings() is None:
        raise _unsupported(spec.path, f"{type(model).__name__} has no LM head")
    return model.eval()


def refuse_config(config: PreTrainedConfig, path: str) -> None:
    """Raise WorkerFailed for a model whose cache is not plain keys and values of all past tokens."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    others = sorted({kind for kind in layer_types or () if kind != "full_attention"})
    if others:
        raise _unsupported(path, f"it has layers of type {', '.join(others)}")
    if layer_types is None and getattr(text, "sliding_window", None):
        raise _unsupported(path, f"it attends to a sliding window of {text.sliding_window} tokens")
    if config.is_encoder_decoder:
        raise _unsupported(path, "it is an encoder-decoder")


def stop_ids(model: PreTrainedModel, path: str) -> frozenset[int]:
    """Return the ids that always end a completion: the generation config's EOS, or else the tokenizer's."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    # Without tokenizer files transformers makes up a tokenizer of the model's family, with ids of its own.
    if eos is None and (not Path(path).is_dir() or Path(path, "tokenizer_config.json").exists()):
        try:
            eos = AutoTokenizer.from_pretrained(path, local_files_only=True).eos_token_id
        except (OSError, ValueError, KeyError):
            eos = None  # only the request's own stop tokens end it
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])


def _unreadable(path: str, error: Exception) -> WorkerFailed:
    if not Path(path).exists():
        return WorkerFailed(
            f"model.path {path!r} is not a folder here and could not be fetched as a hub id ({first_line(error)}); "
            "give the path of a Hugging Face folder"
        )
    return WorkerFailed(
        f"cannot load a causal language model from {path!r} ({first_line(error)}); "
        "give a Hugging Face folder with config.json and safetensors weights of a decoder model"
    )


def _unsupported(path: str, reason: str) -> WorkerFailed:
    return WorkerFailed(
        f"the engine 'transformers' cannot run the model in {path!r}: {reason}; use engine vllm or sglang for it"
    )
