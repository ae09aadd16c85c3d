"""The model: a Hugging Face model in float32 that computes packed rows, with an LM head or a critic's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from areal.algorithms.update import attention, probe
from areal.algorithms.update.logprobs import head_logprobs, logit_scaling
from areal.algorithms.update.module import AMP_DTYPES, checkpoint_activations, stop_dropout
from areal.algorithms.update.packing import Packed, pack
from areal.builtins.loading import LOADING_ERRORS, first_line
from areal.builtins.quiet import no_progress_bar
from areal.contracts.specs import AmpSpec, BackendContext
from areal.errors import WorkerFailed


class PackedModel(ABC):
    """Invariant: a token's number depends on its row and the weights, not on the rows packed with it."""

    def __init__(self, context: BackendContext, device: torch.device) -> None:
        """Load ``context.model.path``; WorkerFailed in one sentence."""
        self._device = device
        self._amp: AmpSpec = context.training.amp
        self._path = context.model.path
        self.module = self._load()
        nn.Module.to(self.module, device)
        self.module.eval()
        stop_dropout(self.module)
        self._backbone: nn.Module = self.module.base_model
        self._prepare()
        if context.training.activation_checkpointing:
            checkpoint_activations(self.module)

    @abstractmethod
    def _load(self) -> PreTrainedModel:
        """Return the model with its head."""

    @abstractmethod
    def _prepare(self) -> None:
        """Find the head and switch to this backend's attention."""

    @abstractmethod
    def _numbers(self, hidden: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """Return what `token_numbers` does, from the states of the predictors ([P, H])."""

    def token_numbers(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """Return a number for each trained token and the entropy there ([N] float32 each).

        The number is its logprob, or a critic's value of the state before it; with gradient if grad is enabled.
        """
        with torch.autocast(self._device.type, AMP_DTYPES[self._amp.dtype], enabled=self._amp.enabled):
            hidden = self._backbone(
                input_ids=packed.token_ids.unsqueeze(0),
                position_ids=packed.positions.unsqueeze(0),
                row_groups=packed.groups,
                use_cache=False,
            ).last_hidden_state
            return self._numbers(hidden[0, packed.predictors], packed, temperature)


class PolicyModel(PackedModel):
    """A causal language model. Invariant: logprobs are those of the model's own forward pass, row by row."""

    def _load(self) -> PreTrainedModel:
        model, _ = _load(AutoModelForCausalLM, self._path)
        return model

    def _prepare(self) -> None:
        head = _head(self.module, self._path)
        self._head = cast(nn.Linear, head)  # if it is more, `_check_packing` notices
        self._scale, self._softcap = logit_scaling(self.module.config.get_text_config())
        self._check_packing()

    def _numbers(self, hidden: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        return head_logprobs(
            hidden,
            self._head.weight,
            packed.predictor,
            packed.targets,
            temperature,
            bias=self._head.bias,
            scale=self._scale,
            softcap=self._softcap,
        )

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Refuse a model whose logprobs of packed rows are not those of its own forward pass, row by row."""
        rows = probe.probe_rows(self.module.config.get_text_config().vocab_size)
        amp, self._amp = self._amp, AmpSpec()
        try:
            own = probe.own_logprobs(self.module, rows, self._device)
            self.module.set_attn_implementation(attention.NAME)
            packed, _ = self.token_numbers(pack(rows, range(len(rows)), self._device), 1.0)
            complaint = probe.complaint(own, packed)
        except probe.ERRORS as error:
            raise _unsupported(self._path, f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            self._amp = amp
        if complaint:
            raise _unsupported(self._path, complaint)


class CriticModel(PackedModel):
    """A backbone with one number for each state. Invariant: a head that the folder does not hold starts at 0."""

    def _load(self) -> PreTrainedModel:
        model, missing = _load(AutoModelForTokenClassification, self._path, num_labels=1)
        head: Any = getattr(model, "score", None)
        if not isinstance(head, nn.Linear):
            raise _unsupported(self._path, f"{type(model).__name__} has no linear head 'score' for a critic")
        for name, parameter in head.named_parameters():
            if f"score.{name}" in missing:
                nn.init.zeros_(parameter)
        return model

    def _prepare(self) -> None:
        self._head = cast(nn.Module, self.module.score)
        # The policy's model has the same layers, and compares what they give with its own forward pass.
        self.module.set_attn_implementation(attention.NAME)

    def _numbers(self, hidden: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device.type, enabled=False):  # values are subtracted from each other
            values = self._head(hidden.float())[packed.predictor, 0]
        return values, torch.zeros_like(values)


def _load(kind: Any, path: str, **more: Any) -> tuple[PreTrainedModel, Collection[str]]:
    """Return the model and the names of the weights that the folder does not hold."""
    if not path:
        raise WorkerFailed("the backend has no model: model.path is empty; give a Hugging Face folder or hub id")
    # A folder is never looked up on the network. Eager attention is what every model has.
    source: dict[str, Any] = {"local_files_only": Path(path).is_dir(), "output_loading_info": True, **more}
    try:
        with no_progress_bar():
            model, info = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **source)
            return model, info["missing_keys"]
    except LOADING_ERRORS as error:
        said = first_line(error)
        if Path(path).exists():
            reason = f"cannot load a causal language model from {path!r} ({said})"
        else:
            reason = f"the model {path!r} is not a folder here and could not be fetched as a hub id ({said})"
        raise WorkerFailed(f"{reason}; give a Hugging Face folder with config.json and safetensors weights") from error


def _head(module: PreTrainedModel, path: str) -> nn.Module:
    head = module.get_output_embeddings()
    if head is None:
        raise _unsupported(path, f"{type(module).__name__} has no LM head")
    return head


def _unsupported(path: str, reason: str) -> WorkerFailed:
    return WorkerFailed(
        f"the backend 'torch' cannot train the model in {path!r} ({reason}); use a decoder with plain causal or "
        "sliding-window attention, or another backend"
    )
