"""The critic: a second instance of the backend that foretells rewards, trained beside the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from statistics import pvariance

from areal.contracts.algorithm import Loss, UsesCritic
from areal.contracts.backend import CRITIC, Backend, Values
from areal.contracts.component import Component
from areal.contracts.messages import Batch, Row
from areal.contracts.specs import BackendContext
from areal.errors import ConfigError, PluginError

FOLDER = "critic"


class Critic:
    """Invariant: its updates are the policy's mini-batches, rows without advantage included."""

    def __init__(self, backend: Values, loss: Loss) -> None:
        self._backend = backend
        self._loss = loss

    def start(self) -> None:
        self._backend.start()

    def values(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._backend.values(batch)

    def train(self, batch: Batch) -> Mapping[str, float]:
        """Make one update and return its statistics, named ``critic/...``."""
        return {f"critic/{name}": value for name, value in self._backend.train_step(batch, self._loss).items()}

    def judged(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """Return how much of the returns' variance the values before the step explained: 1 is all, 0 nothing."""
        returns = [*_trained(rows, lambda row: row.returns)]
        misses = [r - v for r, v in zip(returns, _trained(rows, lambda row: row.values), strict=True)]
        spread = pvariance(returns) if returns else 0.0
        return {"critic/explained_variance": 1 - pvariance(misses) / spread} if spread > 0 else {}

    def save(self, path: str) -> None:
        self._backend.save(str(Path(path) / FOLDER))

    def load(self, path: str) -> None:
        self._backend.load(str(Path(path) / FOLDER))


def make_critic(
    algorithm: UsesCritic,
    backend: Component,
    instance: Callable[[BackendContext], Backend],
    context: BackendContext,
) -> Critic:
    """Return a critic that differs from the policy in its head and perhaps its learning rate; ConfigError."""
    if CRITIC not in backend.capabilities:
        raise ConfigError(
            f"the algorithm has a critic and the backend {backend.name!r} cannot be one; use backend torch, or an "
            "algorithm without a critic, such as grpo"
        )
    rate: float = getattr(algorithm, "critic_learning_rate", None) or context.training.learning_rate
    made = instance(replace(context, role="critic", training=replace(context.training, learning_rate=rate)))
    if not isinstance(made, Values):
        raise PluginError(f"the backend {backend.name!r} declares {CRITIC!r} and has no method values")
    return Critic(made, algorithm.critic)


def _trained(rows: Sequence[Row], field: Callable[[Row], Sequence[float] | None]) -> Iterator[float]:
    for row in rows:
        yield from compress(field(row) or (), row.loss_mask)
