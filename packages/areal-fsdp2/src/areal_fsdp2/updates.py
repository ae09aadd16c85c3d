"""The update of the weights, one FSDP module's after another's, in the step itself or in a thread beside what follows.

The thread computes on this rank's own parts and makes no collective, so that their order is that of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal.errors import WorkerFailed, first_line
from areal_fsdp2.shards import local

CLOSE_S = 60.0
"""How long `close` waits for an update."""


class Unit:
    """Parameters that are updated together. Invariant: until `wait` has returned, only the update touches them."""

    def __init__(self, module: nn.Module, adam: torch.optim.Optimizer) -> None:
        """`module`: whose forward pass needs them; `adam`: has them, and no others."""
        self.module = module
        self.adam = adam
        self._update: Future[None] | None = None

    @torch.no_grad()
    def update(self, factor: float, learning_rate: float) -> None:
        """Update the weights with the gradients times `factor`, and forget these."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                if factor != 1.0 and parameter.grad is not None:
                    local(parameter.grad).mul_(factor)
        self.adam.step()
        self.adam.zero_grad()

    def begin(self, thread: ThreadPoolExecutor, factor: float, learning_rate: float) -> None:
        """Let `update` be made in a thread."""
        self._update = thread.submit(self.update, factor, learning_rate)

    def wait(self, deadline_s: float) -> None:
        """Return once the update that was begun is made; WorkerFailed, this time and ever after, where it was not."""
        if self._update is None:
            return
        if not futures.wait([self._update], deadline_s).done:
            raise WorkerFailed(f"the update of the weights did not end within {deadline_s:g} s")
        if (error := self._update.exception()) is not None:
            said = first_line(error) or type(error).__name__
            raise WorkerFailed(f"the update of the weights failed ({said}); go on from a checkpoint") from error
        self._update = None


class Updates:
    """Invariant: a forward pass reads weights whose update is made; after `settle` all are."""

    def __init__(self, units: Sequence[Unit], deadline_s: float, *, overlaps: bool) -> None:
        """`units`: in the order of the forward pass; `overlaps`: an update goes on beside what comes after `begin`."""
        self.units = tuple(units)
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, "areal-update") if overlaps else None
        if overlaps:
            for unit in units:
                # Before FSDP's own hook, which gathers the weights.
                unit.module.register_forward_pre_hook(self._waiting(unit), prepend=True)

    def begin(self, factor: float, learning_rate: float) -> None:
        """Update all units with their gradients times `factor`, and forget these."""
        for unit in self.units:
            if self._thread is None:
                unit.update(factor, learning_rate)
            else:
                unit.begin(self._thread, factor, learning_rate)

    def settle(self) -> None:
        """Wait for all units; WorkerFailed where an update failed, or does not end within the deadline."""
        for unit in reversed(self.units):  # the last one ends last
            unit.wait(self._deadline_s)

    def close(self) -> None:
        """End the thread, with what it has to do. Idempotent."""
        if self._thread is not None:
            futures.wait([self._thread.submit(int)], CLOSE_S)  # what is submitted last is done last
            self._thread.shutdown(wait=False)
            self._thread = None

    def _waiting(self, unit: Unit) -> Any:
        def before_forward(_module: nn.Module, _args: Any) -> None:
            unit.wait(self._deadline_s)

        return before_forward


def by_module(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return which of the parameters each FSDP module gathers, in the order of the forward pass; the root is first."""
    left = {id(parameter): parameter for parameter in parameters}
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    # Modules stand before what is in them: from behind, each takes what those in it have left.
    for part in reversed([part for part in module.modules() if isinstance(part, FSDPModule)]):
        own = [left.pop(id(parameter)) for parameter in part.parameters() if id(parameter) in left]
        if own:
            found.append((part, own))
    assert not left, "every parameter is in an FSDP module"
    return found[::-1]
