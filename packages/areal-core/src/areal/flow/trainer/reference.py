"""The reference policy: the run's own before its first step, or another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from areal.contracts.algorithm import ACTOR_0
from areal.contracts.backend import Backend, KeepsReference
from areal.contracts.messages import Batch, Version
from areal.contracts.specs import BackendContext
from areal.errors import ConfigError


class Reference(Protocol):
    """Whose logprobs a policy is compared with. Invariant: its weights never change after the first step began."""

    def start(self) -> None: ...

    def begin(self, version: Version) -> None:
        """Called before each training step, with the trainer's weights before it."""
        ...

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]: ...


class FrozenActor:
    """``actor@0``: lives in the policy's own backend. Invariant: frozen before the first step, and never again."""

    def __init__(self, backend: KeepsReference) -> None:
        self._backend = backend

    def start(self) -> None:
        return

    def begin(self, version: Version) -> None:
        if version == 0:
            self._backend.freeze_reference()

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._backend.reference_logprobs(batch)


class OtherModel:
    """Another model in an instance of the backend of its own. Invariant: it is never trained."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def start(self) -> None:
        self._backend.start()

    def begin(self, version: Version) -> None:
        return

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._backend.logprobs(batch)


def make_reference(
    ref: str,
    actor: Backend,
    backend_name: str,
    instance: Callable[[BackendContext], Backend],
    context: BackendContext,
) -> Reference | None:
    """Return what `ref` (an algorithm's ``Needs.reference``) names, or None if it is empty; ConfigError."""
    if not ref:
        return None
    if ref != ACTOR_0:
        return OtherModel(instance(replace(context, model=replace(context.model, path=ref))))
    if not isinstance(actor, KeepsReference):
        raise ConfigError(
            f"the algorithm compares with {ACTOR_0} and the backend {backend_name!r} keeps no reference; give "
            "algorithm.ref an HF folder, or use backend torch"
        )
    return FrozenActor(actor)
