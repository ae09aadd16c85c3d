"""The backend ``sim``: a training step takes the time that its tokens would, and nothing is learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from areal.builtins.sim.clock import charge
from areal.contracts.algorithm import Loss
from areal.contracts.messages import Batch
from areal.contracts.options import Options
from areal.contracts.sending import KeptSender
from areal.contracts.specs import BackendContext
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.errors import JournalError

FILE = "simulated.json"
FORWARD_SHARE = 1 / 3
"""A forward pass of the three units of work of a training step; the backward pass is the other two."""


class SimBackendOptions(Options):
    """Invariant: seconds depend on the tokens of the batch alone.

    The defaults are those of a dense model of about 7 billion parameters on 32 H100 at 40 % of their speed: 6 FLOP a
    parameter and token.
    """

    step_s: float = Field(default=2.0, ge=0)
    """Seconds of an optimizer update, whatever the batch."""
    s_per_token: float = Field(default=3.3e-6, ge=0)
    """Seconds for each token of each row, prompts included."""
    save_s: float = Field(default=20.0, ge=0)
    """Seconds of a checkpoint."""


class SimBackend:
    """Counts updates and takes time. Invariant: what it saves and loads are its few numbers.

    The conformance kit of backends compares losses, gradients and weights with PyTorch's, and here are none.
    """

    def __init__(self, options: SimBackendOptions, context: BackendContext) -> None:
        self._options = options
        self._learning_rate = context.training.learning_rate
        self._updates = 0
        self._sender = KeptSender()

    def start(self) -> None: ...

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        """Return the engine's own: both are the same policy."""
        charge(FORWARD_SHARE * self._seconds(batch))
        return [row.logprobs for row in batch.rows]

    def train_step(self, batch: Batch, loss: Loss, learning_rate: float | None = None) -> Mapping[str, float]:
        charge(self._options.step_s + self._seconds(batch))
        self._updates += bool(batch.rows)
        return {
            "loss": 0.0,
            "grad_norm": 0.0,
            "learning_rate": self._learning_rate if learning_rate is None else learning_rate,
            "skipped": float(not batch.rows),
        }

    def layout(self) -> Layout:
        return Layout(host="sim", collective="sim")

    def send(self, transfer: Transfer) -> Receipt:
        return self._sender.of(transfer).send(transfer.version, (), transfer.deadline_s)

    def save(self, path: str) -> None:
        folder = Path(path, "model")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps({"updates": self._updates}) + "\n", encoding="utf-8")
        charge(self._options.save_s)

    def load(self, path: str) -> None:
        """JournalError when the file is missing or damaged."""
        file = Path(path, "model", FILE)
        try:
            self._updates = int(json.loads(file.read_text(encoding="utf-8"))["updates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JournalError(f"the checkpoint {file} cannot be read: {error}") from error
        charge(self._options.save_s)

    def _seconds(self, batch: Batch) -> float:
        return self._options.s_per_token * sum(len(row.token_ids) for row in batch.rows)
