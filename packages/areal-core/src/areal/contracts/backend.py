"""The training backend: owns the master weights and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from areal.contracts.algorithm import Loss
from areal.contracts.messages import Batch
from areal.contracts.options import Options
from areal.contracts.specs import ModelSpec, TrainerDevices, TrainingSpec
from areal.contracts.transfer import Layout, Receipt, Transfer

DISTRIBUTED = "distributed"
"""Capability of a backend that trains on several ranks; its options are `DistributedOptions`."""


class DistributedOptions(Options):
    """Base of such a backend's options. Invariant: what `problem` passes starts on that many ranks."""

    def problem(self, devices: TrainerDevices, model: ModelSpec, training: TrainingSpec) -> str:
        """Return why this cannot run, with the nearest values that can, in one sentence; empty: it can.

        Called when the recipe is read, so it is light. `model.path` may be a folder, empty, or a hub id that is not
        here yet.
        """
        return ""


@runtime_checkable
class Backend(Protocol):
    """One trainer rank. Made as ``factory(options, BackendContext)``; all ranks get the same calls.

    Invariant: the update depends on the batch, not on its packing into micro-batches.

    Several ranks (capability `DISTRIBUTED`) are a process each. In one process there may be several instances: the
    policy, a reference, a critic, made and started in this order on every rank. The first that starts makes the default
    group of torch.distributed at ``BackendContext.rendezvous``, the others find it made and take their groups from it;
    whoever made it ends it in `close`, which is called in the reverse order. What is computed over all ranks is
    returned on every rank: rank 0's answers are the trainer's. An error on one rank should be one on all; where it is
    not, the ranks that wait for it are ended after some time. A rank that dies ends all of them, without `close`.
    """

    def start(self) -> None:
        """Load the model and make the optimizer."""
        ...

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] logprobs of its tokens (0 where loss_mask is False) under the current weights."""
        ...

    def train_step(self, batch: Batch, loss: Loss, learning_rate: float | None = None) -> Mapping[str, float]:
        """Make one optimizer update and return its statistics.

        Always there: ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``skipped`` (1 when a
        non-finite gradient or an empty batch left the weights alone), and the loss's own.
        `learning_rate` replaces the schedule's (supervised warm-up) and does not advance the schedule.
        """
        ...

    def layout(self) -> Layout:
        """Return how the weights lie, with every parameter's HF name, shape and dtype: on every rank the same.

        Several ranks say in `Layout.pieces` who sends what.
        """
        ...

    def send(self, transfer: Transfer) -> Receipt:
        """Send this rank's pieces of the current weights along the transfer's plan (phase ``stage``); TransferFailed.

        A plan whose source has no pieces wants every tensor whole from rank 0; the other ranks help to gather them and
        return a receipt without checksums. A rank that cannot send takes part in the gathering to its end all the same,
        and raises then.
        """
        ...

    def save(self, path: str) -> None:
        """Write ``path/model`` (an HF folder with tokenizer) and the optimizer, schedule and RNG state beside it.

        All ranks get the same folder, which is there and empty. See `SavesInBackground`.
        """
        ...

    def load(self, path: str) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...


@runtime_checkable
class Closes(Protocol):
    """Optional: a backend that holds what outlives its process. Invariant: a second `close` does nothing."""

    def close(self) -> None:
        """Give back shared memory, process groups and files; called once, after the last other call."""
        ...


@runtime_checkable
class SavesInBackground(Protocol):
    """Optional: a backend whose `save` returns as soon as later calls cannot change what it writes.

    Invariant: what `finish_save` has returned for is whole on disk and is the state at the time of `save`.
    """

    def finish_save(self) -> None:
        """Block until all that this rank writes of the last `save` is there, or raise; nothing to do: return.

        Called on all ranks after each `save` and before the next, in a thread of its own beside other calls; so
        collectives in it need a process group of their own.
        """
        ...


@runtime_checkable
class SendsInBackground(Protocol):
    """Optional: a backend whose weights may change while they are still on their way.

    Invariant: what `finish_send` sends are the weights at the time of `begin_send`.
    """

    def begin_send(self, transfer: Transfer) -> None:
        """Take what `send` would send, and return as soon as later calls cannot change it; TransferFailed."""
        ...

    def finish_send(self) -> Receipt:
        """Block until `send` would have returned, and return or raise the same.

        Called once after each `begin_send` that has returned, in a thread of its own beside other calls.
        """
        ...


@runtime_checkable
class Offloads(Protocol):
    """Optional (capability `OFFLOAD`): a backend that can do without its device between two steps.

    Invariant: after `offload` and `onload` every number it gives and every update it makes is what it would have been.
    """

    def offload(self) -> None:
        """Give back the device's memory of weights, optimizer and references; what they hold waits in the host's.

        Idempotent. Meanwhile `layout`, `save` and `close` work; all else raises WorkerFailed.
        """
        ...

    def onload(self) -> None:
        """Take the memory again, with all that was in it; harmless when it has not been given back."""
        ...


@runtime_checkable
class KeepsReference(Backend, Protocol):
    """Optional: a backend that shares its weights with the reference policy ``actor@0``.

    Invariant: training changes no reference logprob; `save` and `load` keep the reference.
    """

    def freeze_reference(self) -> None:
        """Make the current weights the reference, in place of an earlier one."""
        ...

    def reference_logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return what `logprobs` does, under the reference's weights; WorkerFailed before `freeze_reference`."""
        ...


CRITIC = "critic"
"""Capability of a backend that can be made with ``BackendContext.role`` critic and then implements `Values`."""


@runtime_checkable
class Values(Backend, Protocol):
    """Optional: a backend made as a critic. Invariant: values of a new head are 0."""

    def values(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] the value of the state before each trained token (0 where loss_mask is False)."""
        ...
