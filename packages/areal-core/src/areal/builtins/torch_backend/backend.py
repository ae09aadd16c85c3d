"""The backend `torch`: master weights in float32 on one device, micro-batches without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from areal.algorithms.update.module import random_state, set_random_state
from areal.algorithms.update.packing import Packed, micro_batches, pack
from areal.algorithms.update.regions import checkpoint_tensors
from areal.algorithms.update.schedule import learning_rate as scheduled_rate
from areal.algorithms.update.sending import BackgroundSender
from areal.algorithms.update.state import load_state, load_tokenizer, save_state
from areal.algorithms.update.statistics import combined
from areal.algorithms.update.tokens import by_rows, check_vocabulary, computed_totals, token_batch
from areal.builtins.moving import HOST, free_unused, move_module
from areal.builtins.torch_backend import state
from areal.builtins.torch_backend.model import CriticModel, PackedModel, PolicyModel
from areal.builtins.torch_backend.optimizer import Optimizer
from areal.builtins.torch_backend.options import TorchBackendOptions
from areal.builtins.torch_backend.reference import FrozenReference
from areal.contracts.algorithm import Loss
from areal.contracts.messages import Batch
from areal.contracts.specs import BackendContext
from areal.contracts.transfer import Layout, Receipt, TensorSpec, Transfer, local_host
from areal.errors import ConfigError, WorkerFailed


class TorchBackend:
    """Any Hugging Face causal language model on one device, or a critic on its backbone.

    Invariant: the update depends on the batch, not on its packing into micro-batches; `logprobs` and `train_step`
    compute the same numbers for the same rows.
    """

    def __init__(self, options: TorchBackendOptions | None, context: BackendContext) -> None:
        """Raises ConfigError for a trainer of several ranks."""
        if context.world_size > 1:
            raise ConfigError(
                f"the backend 'torch' trains on one device and {context.world_size} were asked for; use backend fsdp2"
            )
        self._options = options or TorchBackendOptions()
        self._context = context
        self._dtype: torch.dtype = getattr(torch, context.model.dtype)
        self._device = torch.device(context.accelerator.name)
        self._num_updates = 0
        self._is_away = False
        self._sender = BackgroundSender()
        self._model: PackedModel | None = None
        self._reference: FrozenReference | None = None
        self._optimizer: Optimizer

    def start(self) -> None:
        """Load the model and make the optimizer; WorkerFailed for a model that cannot be loaded or packed."""
        if self._context.role == "critic":
            self._model = CriticModel(self._context, self._device)
        else:
            self._model = PolicyModel(self._context, self._device)
        module = self._model.module
        self._optimizer = Optimizer(module, self._context.training, self._options.adam_eps, self._device)
        self._tokenizer = load_tokenizer(self._context.model.path)

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] logprobs of its tokens (0 where loss_mask is False) under the current weights."""
        return self._numbers(batch)

    def values(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] a critic's values of the states before its trained tokens (0 elsewhere)."""
        return self._numbers(batch)

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Keep a copy of the current weights (float32) as ``actor@0``."""
        self._reference = FrozenReference(
            [parameter.detach().clone() for parameter in self._started().module.parameters()]
        )

    def reference_logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return what `logprobs` does, under the weights of ``actor@0``."""
        if self._reference is None:
            raise WorkerFailed(
                "there is no reference: it is frozen before the first step, and this run went on from a checkpoint "
                "without one; give algorithm.ref an HF folder, or start a new run"
            )
        with self._reference.in_place(self._started().module):
            return self._numbers(batch)

    @torch.no_grad()
    def _numbers(self, batch: Batch) -> list[tuple[float, ...]]:
        model = self._started()
        check_vocabulary(batch, model.module.config.get_text_config().vocab_size, self._context.model.path)
        order: list[int] = []
        numbers: list[float] = []
        for packed in _packs(batch, self._context.training.micro_batch_tokens, self._device):
            values, _ = model.token_numbers(packed, batch.temperature)
            order += packed.rows
            numbers += values.tolist()
        return by_rows(batch, order, numbers)

    def train_step(self, batch: Batch, loss: Loss, learning_rate: float | None = None) -> Mapping[str, float]:
        """Make one optimizer update; see the contract. A batch without trained tokens moves the schedule only."""
        model = self._started()
        rate = scheduled_rate(self._context.training, self._num_updates) if learning_rate is None else learning_rate
        totals = computed_totals(batch)
        shares: list[dict[str, Tensor]] = []
        for packed in _packs(batch, self._context.training.micro_batch_tokens, self._device):
            numbers, entropy = model.token_numbers(packed, batch.temperature)
            value, named = loss.loss(numbers, token_batch(batch, packed, numbers.detach(), entropy, **totals))
            self._optimizer.backward(value)
            shares.append({"loss": value, **named})
        grad_norm, skipped = self._optimizer.step(rate)
        self._num_updates += learning_rate is None
        return {
            "loss": 0.0,
            **combined(shares),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "skipped": float(skipped),
        }

    def layout(self) -> Layout:
        """Return the parameters under their HF names in the dtype of ``model.dtype``; tied ones stand once."""
        dtype = self._context.model.dtype
        return Layout(
            host=local_host(),
            collective=self._context.accelerator.collective,
            dtype=dtype,
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)
                for name, tensor in _weights(self._started(may_be_away=True))
            ),
        )

    def send(self, transfer: Transfer) -> Receipt:
        """Send the weights; the plan's sender is kept for the next version. TransferFailed."""
        return self._sender.send(transfer, _weights(self._started()))

    def begin_send(self, transfer: Transfer) -> None:
        """Take the weights as they are now; TransferFailed."""
        self._sender.take(transfer, _weights(self._started()))

    def finish_send(self) -> Receipt:
        """Send what `begin_send` took; TransferFailed."""
        return self._sender.deliver()

    def save(self, path: str) -> None:
        """Write ``path/model`` (HF, in ``model.dtype``) and ``path/trainer.pt`` (float32 weights and all the rest)."""
        module = self._started(may_be_away=True).module
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        state.save_model(module, self._tokenizer, self._dtype, folder / state.MODEL_FOLDER)
        everything = {
            "weights": dict(module.named_parameters()),
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self._num_updates,
            "random": random_state(self._device),
            "reference": None if self._reference is None else self._reference.weights,
        }
        save_state(everything, folder / state.STATE_FILE)

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Restore what `save` wrote, bit for bit; JournalError when it is not there, ConfigError for another model."""
        model = self._started()
        saved = load_state(Path(path), state.STATE_FILE, "torch")
        weights: Mapping[str, Tensor] = saved["weights"]
        parameters = dict(model.module.named_parameters())
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in parameters.items()}:
            raise ConfigError(f"the checkpoint {path!r} holds another model than {self._context.model.path!r}")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._num_updates = saved["num_updates"]
        kept: list[Tensor] | None = saved.get("reference")
        self._reference = None if kept is None else FrozenReference([tensor.to(self._device) for tensor in kept])
        set_random_state(saved["random"], self._device)

    def interrupt(self) -> None:
        """Make the `send` that runs wait no longer for receivers that are gone, where the resharder can."""
        self._sender.interrupt()

    def offload(self) -> None:
        """Move weights, moments and reference to the host's memory."""
        self._move(HOST)
        self._sender.free()
        self._is_away = True

    def onload(self) -> None:
        """Move weights, moments and reference back to the device."""
        self._move(self._device)
        self._is_away = False

    def _move(self, device: torch.device | str) -> None:
        move_module(self._started(may_be_away=True).module, device)
        self._optimizer.move(device)
        if self._reference is not None:
            self._reference.move(device)
        free_unused(self._device)

    def close(self) -> None:
        """Close the sender, if there is one."""
        self._sender.close()

    def _started(self, *, may_be_away: bool = False) -> PackedModel:
        """Return the model, on its device unless it `may_be_away`."""
        if self._model is None:
            raise WorkerFailed("the backend was used before start; call start first")
        if self._is_away and not may_be_away:
            raise WorkerFailed("the backend was used while its memory is given away; call onload first")
        return self._model


def _packs(batch: Batch, budget: int, device: torch.device) -> Iterator[Packed]:
    for chosen in micro_batches(batch.rows, budget, whole_groups=batch.whole_groups):
        yield pack(batch.rows, chosen, device)


def _weights(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint_tensors(model.module.named_parameters()):
        yield name, tensor.detach()
