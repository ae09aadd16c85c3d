"""A trainer's process for the tests: it sends one version along a plan, and dies half-way if it is told to."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

from areal.contracts.component import Component
from areal.contracts.transfer import Layout, Plan, TensorSpec, local_host
from areal.testing.models import tiny_module

if TYPE_CHECKING:
    from torch import Tensor


def trainer_layout(tensors: dict[str, Tensor]) -> Layout:
    specs = tuple(TensorSpec(name=name, shape=tuple(t.shape), dtype="float32") for name, t in tensors.items())
    return Layout(host=local_host(), tensors=specs)


class TrainerProcess:
    """Sends the tiny module of `model` (arguments of `tiny_module`). Invariant: alive until `close`, as a trainer is.

    `die_after`: SIGKILL after so many tensors.
    """

    def __init__(
        self,
        component: Component,
        options: Any,
        plan: Plan,
        version: int,
        model: dict[str, Any],
        die_after: int | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._done = context.Event()
        self._process = context.Process(
            target=_send, args=(self._done, component, options, plan, version, model, die_after), daemon=True
        )
        self._process.start()

    def close(self) -> None:
        self._done.set()
        self._process.join(20.0)
        self._process.kill()


def _send(
    done: Event,
    component: Component,
    options: Any,
    plan: Plan,
    version: int,
    model: dict[str, Any],
    die_after: int | None,
) -> None:
    module = tiny_module(**model)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(module.named_parameters()):
            if number == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor.detach()

    sender = component.load()(options, "").sender(plan)
    sender.send(version, tensors(), 30.0)
    done.wait(60.0)
    sender.close()
