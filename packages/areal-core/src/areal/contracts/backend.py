"""The training backend: owns the master weights and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from areal.contracts.algorithm import Algorithm
from areal.contracts.messages import Batch
from areal.contracts.transfer import Layout, Receipt, Transfer


@runtime_checkable
class Backend(Protocol):
    """One trainer rank. Made as ``factory(options, BackendContext)``; all ranks get the same calls.

    Invariant: the update depends on the batch, not on its packing into micro-batches.
    """

    def start(self) -> None:
        """Load the model and make the optimizer."""
        ...

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return for each row [T] logprobs of its tokens (0 where loss_mask is False) under the current weights."""
        ...

    def train_step(self, batch: Batch, loss: Algorithm, learning_rate: float | None = None) -> Mapping[str, float]:
        """Make one optimizer update and return its statistics.

        Always there: ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``skipped`` (1 when a
        non-finite gradient or an empty batch left the weights alone), and the algorithm's own.
        `learning_rate` replaces the schedule's (supervised warm-up) and does not advance the schedule.
        """
        ...

    def layout(self) -> Layout:
        """Return how the weights lie, with every parameter's HF name, shape and dtype."""
        ...

    def send(self, transfer: Transfer) -> Receipt:
        """Send the current weights along the transfer's plan (phase ``stage``); TransferFailed."""
        ...

    def save(self, path: str) -> None:
        """Write ``path/model`` (an HF folder with tokenizer) and the optimizer, schedule and RNG state beside it."""
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
