"""The optimizer: AdamW over sharded parameters, clipping across meshes, loss scaling that all ranks agree on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from areal.contracts.specs import TrainingSpec
from areal_fsdp2.shards import local
from areal_fsdp2.updates import Unit, Updates, by_module

DYNAMIC_SCALE = 2.0**16
"""Where a dynamic loss scale starts; the first updates may be skipped until it has fallen far enough."""
GROWTH_INTERVAL = 2000
"""Updates without an overflow after which a dynamic loss scale doubles."""


class LossScale:
    """What losses are multiplied by so that float16 gradients do not vanish. Invariant: the same on every rank."""

    def __init__(self, training: TrainingSpec) -> None:
        amp = training.amp
        scaled = amp.enabled and amp.dtype == "fp16"
        self._is_dynamic = scaled and amp.loss_scale == "dynamic"
        self.value = 1.0
        if scaled:
            self.value = DYNAMIC_SCALE if amp.loss_scale == "dynamic" else float(amp.loss_scale)
        self._num_good = 0

    def update(self, finite: bool) -> None:
        """Fall after a gradient that was not finite, rise after many that were."""
        if not self._is_dynamic:
            return
        self._num_good = self._num_good + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self._num_good == GROWTH_INTERVAL:
            self.value *= 2
            self._num_good = 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state; one of a scale that was off is empty."""
        if self._is_dynamic and state:
            self.value, self._num_good = float(state["value"]), int(state["num_good"])


class Optimizer:
    """Invariant: an update with a non-finite gradient leaves weights and moments as they were, on every rank.

    Where the weights rest in the host's memory, an update may go on beside what comes after `step`: see `settle`. In a
    device's memory it is queued behind the backward pass, and does not make the host wait anyway.
    """

    def __init__(
        self,
        module: nn.Module,
        training: TrainingSpec,
        eps: float,
        device: torch.device,
        stages: dist.ProcessGroup | None = None,
        copies: Sequence[Tensor] = (),
        *,
        overlaps: bool = True,
    ) -> None:
        """`module`: an FSDP module; `stages`: the ranks that hold the other layers of this rank's part of a pipeline;
        `copies`: parameters that another stage has too and counts; `overlaps`: whether an update may go on."""
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._stages = stages
        left_out = {id(parameter) for parameter in copies}
        self._counted = [parameter for parameter in self._parameters if id(parameter) not in left_out]
        self._grad_clip = training.grad_clip
        self.scale = LossScale(training)
        rests_in_host = all(parameter.device.type == "cpu" for parameter in self._parameters)

        def adam_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.AdamW(
                _groups(parameters, training.weight_decay),
                lr=training.learning_rate,
                betas=training.betas,
                eps=eps,
                fused=device.type in ("cpu", "cuda"),
            )

        overlaps = overlaps and rests_in_host
        parts = by_module(module, self._parameters) if overlaps else [(module, self._parameters)]
        units = [Unit(part, adam_of(parameters)) for part, parameters in parts]
        self._updates = Updates(units, training.step_timeout_s, overlaps=overlaps)

    @property
    def adams(self) -> list[torch.optim.Optimizer]:
        """What holds the moments; each parameter is in one of them. To be looked at after `settle`."""
        return [unit.adam for unit in self._updates.units]

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to what has been collected since the last `step`."""
        self.scaled(loss).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss as it is to be differentiated."""
        return loss * self.scale.value

    @torch.no_grad()
    def step(self, learning_rate: float) -> tuple[float, bool]:
        """Update the weights with the collected gradient and forget it, or begin to.

        Returns the global norm of the gradient before clipping, and whether the update was skipped because the
        gradient was not finite. Raises as `settle`.
        """
        self.settle()
        norm = total_norm(self._counted, self._stages) / self.scale.value
        finite = bool(norm.isfinite())
        factor = 1.0 / self.scale.value
        if self._grad_clip:
            factor = factor * min(1.0, self._grad_clip / (float(norm) + 1e-6))
        self.scale.update(finite)
        if finite:
            self._updates.begin(factor, learning_rate)
        else:
            for parameter in self._parameters:
                parameter.grad = None
        return float(norm), not finite

    def settle(self) -> None:
        """Return once the last update is made; before, only forward passes may use weights, which wait by themselves.

        WorkerFailed where it failed, or did not end within the deadline of a step.
        """
        self._updates.settle()

    def close(self) -> None:
        """End what updates the weights. Idempotent."""
        self._updates.close()


def total_norm(parameters: list[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Return the norm of all gradients of all ranks ([] float32), the same on each; every number counts once.

    Squares are added over those dimensions of a gradient's mesh along which ranks hold different parts of it.
    """
    squares: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for parameter in parameters:
        gradient, device = parameter.grad, parameter.device
        norm = torch.zeros((), device=device)
        if gradient is not None:
            norm = torch.linalg.vector_norm(local(gradient), dtype=torch.float32)
        squares[_spread(parameter)].append(norm.square())
    total = torch.zeros((), device=device)
    for (mesh, axes), parts in squares.items():
        sum_of_squares = torch.stack(parts).sum()
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(sum_of_squares, group=mesh.get_group(axis))
        total = total + sum_of_squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def _spread(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return a parameter's mesh and the dimensions of it along which the ranks' parts differ."""
    if not isinstance(parameter, DTensor):
        return None, ()
    axes = tuple(axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return parameter.device_mesh, axes


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """One group for each mesh, which fused AdamW needs, and of those one without decay: norms and biases."""
    groups: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[_spread(parameter)[0], parameter.ndim > 1].append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if is_matrix else 0.0}
        for (_, is_matrix), members in groups.items()
    ]
