"""The backend `fsdp2`: one rank of a trainer whose weights, rows and sequences are spread over a mesh of devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import torch

from areal.algorithms.update.module import random_state, set_random_state
from areal.algorithms.update.schedule import learning_rate as scheduled_rate
from areal.algorithms.update.sending import BackgroundSender
from areal.algorithms.update.state import load_tokenizer
from areal.algorithms.update.tokens import check_vocabulary
from areal.contracts.algorithm import Loss
from areal.contracts.messages import Batch
from areal.contracts.specs import BackendContext
from areal.contracts.transfer import Layout, Receipt, Transfer, local_host
from areal.errors import ConfigError, WorkerFailed
from areal_fsdp2 import loading, lora
from areal_fsdp2.boxes import Kinds
from areal_fsdp2.checkpoint import Checkpoints, Export
from areal_fsdp2.export import describe, stage
from areal_fsdp2.lora import Adapters
from areal_fsdp2.mesh import Mesh, leave
from areal_fsdp2.mismatch import other_alpha
from areal_fsdp2.model import PackedModel, make_model
from areal_fsdp2.optimizer import Optimizer
from areal_fsdp2.options import Fsdp2Options
from areal_fsdp2.passes import Passes
from areal_fsdp2.probing import check_packing
from areal_fsdp2.publishing import Outgoing
from areal_fsdp2.recording import OrderFile
from areal_fsdp2.reference import FrozenReference
from areal_fsdp2.shards import Part, Shards, parts_of
from areal_fsdp2.trained import Trained

_STARTED: WeakSet[Fsdp2Backend] = WeakSet()
"""The backends of this process that use its process group; the last one that closes gives it back."""


class Fsdp2Backend:
    """One rank; all ranks get the same calls in the same order, and return the same.

    Invariant: the update depends on the batch, not on the mesh or the packing, beyond floating-point rounding.
    """

    def __init__(self, options: Fsdp2Options | None, context: BackendContext) -> None:
        """Raises ConfigError for a mesh that cannot be."""
        self._options = options or Fsdp2Options()
        self._context = context
        if problem := self._options.problem(context.devices, context.model, context.training):
            raise ConfigError(problem)
        self._num_updates = 0
        self._model: PackedModel | None = None
        self._reference: FrozenReference | None = None
        self._sender = BackgroundSender(context.rank)
        self._checkpoints: Checkpoints | None = None
        self._adapters: Adapters | None = None
        self._order: OrderFile | None = None
        self._outgoing: Outgoing
        self._mesh: Mesh
        self._shards: Shards
        self._passes: Passes
        self._optimizer: Optimizer
        self._trained: Trained

    def start(self) -> None:
        """Meet the other ranks, read this rank's share of the model and make the optimizer; WorkerFailed."""
        context = self._context
        folder = loading.folder_of(context.model.path)
        self._mesh = Mesh(context, self._options.dimensions(context.devices, context.model))
        _STARTED.add(self)
        if self._options.record_collectives:
            # A successor's is another file: what its predecessor hung in is still to be read.
            name = f"{context.role}-rank-{context.rank}-process-{os.getpid()}"
            self._order = OrderFile(Path(self._options.record_collectives), name)
        model = make_model(context, self._options, self._mesh, folder)
        parts = parts_of(model.module)
        loading.read([part for part in parts if not lora.is_adapter(part.name)], folder, model.optional)
        self._shards = self._published(model, parts)
        self._outgoing = Outgoing(self._shards, context.rank, self._sender)
        check_packing(model, context, self._mesh.device)
        self._passes = Passes(model, self._mesh, context.training.micro_batch_tokens)
        stages = self._mesh.group("pp") if self._mesh.dimensions.pp > 1 else None
        self._optimizer = Optimizer(
            model,
            context.training,
            self._options.adam_eps,
            self._mesh.device,
            stages,
            model.uncounted(),
            overlaps=self._options.overlap_update,
        )
        self._trained = Trained(model.module, self._optimizer.adams)
        self._checkpoints = Checkpoints(context.role, context.training.step_timeout_s)
        self._tokenizer = load_tokenizer(folder)
        self._model = model

    def _published(self, model: PackedModel, parts: list[Part]) -> Shards:
        """Return what engines get; LoRA's factors come into being here."""
        dtype = self._context.model.dtype
        if self._options.lora is None:
            return Shards(parts, dtype)
        lora.initialise(model.module, self._context.seed)
        self._adapters = Adapters(model.module, parts, self._options.lora, dtype)
        return self._adapters.published

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] logprobs of its tokens (0 where loss_mask is False) under the current weights."""
        model = self._started(settled=False)
        check_vocabulary(batch, model.config.vocab_size, self._context.model.path)
        return self._passes.numbers(batch)

    def values(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] a critic's values of the states before its trained tokens (0 elsewhere)."""
        return self.logprobs(batch)

    def freeze_reference(self) -> None:
        """Keep a copy of this rank's current weights (float32) as its part of ``actor@0``."""
        self._started()
        self._reference = FrozenReference([part.view.clone() for part in self._trained.parts])

    def reference_logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return what `logprobs` does, under the weights of ``actor@0``."""
        self._started()
        if self._reference is None:
            raise WorkerFailed(
                "there is no reference: it is frozen before the first step, and this run went on from a checkpoint "
                "without one; give algorithm.ref an HF folder, or start a new run"
            )
        with self._reference.in_place([part.view for part in self._trained.parts]):
            return self.logprobs(batch)

    def train_step(self, batch: Batch, loss: Loss, learning_rate: float | None = None) -> Mapping[str, float]:
        """Make one optimizer update; see the contract. A batch without trained tokens moves the schedule only."""
        self._started(settled=False)
        rate = scheduled_rate(self._context.training, self._num_updates) if learning_rate is None else learning_rate
        self._num_updates += learning_rate is None
        statistics = self._passes.accumulate(batch, loss, self._optimizer)
        if statistics is None:
            return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate, "skipped": 1.0}
        grad_norm, skipped = self._optimizer.step(rate)
        return {**statistics, "grad_norm": grad_norm, "learning_rate": rate, "skipped": float(skipped)}

    def layout(self) -> Layout:
        """Return the parameters under their HF names in the dtype of ``model.dtype``; tied ones stand once."""
        self._started()
        dimensions = self._mesh.dimensions
        return Layout(
            host=local_host(),
            collective=self._context.accelerator.collective,
            num_ranks=dimensions.world,
            tensor_parallel=dimensions.tp,
            dtype=self._context.model.dtype,
            tensors=self._shards.tensors,
            pieces=self._shards.pieces if dimensions.world > 1 else (),
            adapter=None if self._adapters is None else self._adapters.adapter,
        )

    def send(self, transfer: Transfer) -> Receipt:
        """Send this rank's pieces, or on rank 0 everything if the plan wants no pieces; TransferFailed."""
        self._started()
        return self._outgoing.send(transfer)

    def begin_send(self, transfer: Transfer) -> None:
        """Take this rank's pieces as they are now, where the plan wants pieces; TransferFailed."""
        self._started()
        self._outgoing.begin(transfer)

    def finish_send(self) -> Receipt:
        """Send what `begin_send` took; TransferFailed."""
        self._started(settled=False)
        return self._outgoing.finish()

    def save(self, path: str) -> None:
        """Copy all of the state and begin to write it to ``path``, see checkpoint.py; `finish_save` ends it."""
        model = self._started()
        rest = {
            "num_updates": self._num_updates,
            "scale": self._optimizer.scale.state_dict(),
            "steps": self._trained.steps(),
            "random": random_state(self._mesh.device),
        }
        if self._options.lora is not None:
            rest["lora_alpha"] = self._options.lora.alpha  # what the factors are worth, which no shape tells
        assert self._checkpoints is not None
        self._checkpoints.save(Path(path), self._kinds(), rest, self._exports(model))

    def finish_save(self) -> None:
        """Wait until the last `save` is whole on disk; JournalError where it cannot be written."""
        self._started(settled=False)
        assert self._checkpoints is not None
        self._checkpoints.finish()

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Restore what `save` wrote on any mesh; JournalError when it is not there, ConfigError for another model.

        A checkpoint of the backend `torch` is read, too.
        """
        self._started()
        parts = self._trained.parts
        assert self._checkpoints is not None
        saved = self._checkpoints.open(Path(path), parts, self._context.model.path)
        own = self._options.lora
        if own is not None and (problem := other_alpha(saved.rest.get("lora_alpha", own.alpha), own.alpha)):
            raise ConfigError(f"the checkpoint {path!r} {problem}")
        self._trained.restart(saved.rest["steps"])
        self._reference = None
        if any(key.startswith("reference/") for key in saved.shapes):
            self._reference = FrozenReference([torch.empty_like(part.view) for part in parts])
        saved.read(self._kinds())
        self._num_updates = saved.rest["num_updates"]
        self._optimizer.scale.load_state_dict(saved.rest["scale"])
        states = saved.rest["random"]
        set_random_state(states[self._context.rank % len(states)], self._mesh.device)

    def _kinds(self) -> Kinds:
        """Return this rank's parts of all that a checkpoint holds."""
        parts = self._trained.parts
        kinds: dict[str, list[Part]] = {"weights": parts, **self._trained.moments()}
        if self._reference is not None:
            kept = self._reference.weights
            kinds["reference"] = [replace(part, view=view) for part, view in zip(parts, kept, strict=True)]
        return kinds

    def _exports(self, model: PackedModel) -> list[Export]:
        """Return the folders beside the checkpoint: the model, and what of it is LoRA's."""
        dtype: torch.dtype = getattr(torch, self._context.model.dtype)
        adapters = self._adapters
        weights = stage(self._shards if adapters is None else adapters.merged)
        exports = [Export("model", weights, lambda folder: describe(model.module, self._tokenizer, dtype, folder))]
        if adapters is not None:
            base = self._context.model.path
            exports.append(
                Export(
                    "adapter",
                    stage(adapters.alone),
                    lambda folder: adapters.describe(folder, base),
                    stem="adapter_model",
                    max_bytes=sys.maxsize,  # PEFT reads one file
                )
            )
        return exports

    def interrupt(self) -> None:
        """Make what is being sent wait no longer for receivers that are gone, where the resharder can."""
        self._sender.interrupt()

    def close(self) -> None:
        """Close the sender, if there is one; the last backend of a process leaves the process group."""
        self._sender.close()
        if self._model is not None:
            self._optimizer.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._order is not None:
            self._order.close()
        self._model = None
        if self in _STARTED:
            _STARTED.discard(self)
            if not _STARTED:
                leave()

    def _started(self, *, settled: bool = True) -> PackedModel:
        """Return the model, once its last update is made; WorkerFailed before `start`, and where the update failed.

        Not `settled` is for those only who leave weights, gradients and moments to forward passes, or look at none.
        """
        if self._model is None:
            raise WorkerFailed("the backend was used before start; call start first")
        if settled:
            self._optimizer.settle()
        return self._model
