"""The optimizer: AdamW with clipping, loss scaling, and the refusal of non-finite gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from areal.contracts.specs import TrainingSpec

DYNAMIC_SCALE = 2.0**16
"""Where a dynamic loss scale starts; the first updates may be skipped until it has fallen far enough."""


class Optimizer:
    """Invariant: an update with a non-finite gradient leaves weights and moments as they were."""

    def __init__(self, module: nn.Module, training: TrainingSpec, eps: float, device: torch.device) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        # Norms and biases are not decayed.
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in ((matrices, training.weight_decay), (vectors, 0.0))
            if parameters
        ]
        self._fused = device.type in ("cpu", "cuda")
        self._adam = torch.optim.AdamW(
            groups, lr=training.learning_rate, betas=training.betas, eps=eps, fused=self._fused
        )
        self._grad_clip = training.grad_clip
        amp = training.amp
        self._constant_scale = None if amp.loss_scale == "dynamic" else float(amp.loss_scale)
        scaled = amp.enabled and amp.dtype == "fp16"
        self._scaler = torch.amp.GradScaler(device.type, self._constant_scale or DYNAMIC_SCALE, enabled=scaled)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to what has been collected since the last `step`."""
        self._scaler.scale(loss).backward()

    def step(self, learning_rate: float) -> tuple[float, bool]:
        """Update the weights with the collected gradient and forget it.

        Returns the global norm of the gradient before clipping, and whether the update was skipped because the
        gradient was not finite (then a dynamic loss scale falls) or because there was none.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            return 0.0, True
        self._scaler.unscale_(self._adam)
        norm = nn.utils.get_total_norm(gradients)
        finite = bool(norm.isfinite())
        if finite:
            if self._grad_clip:
                nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip, norm)
            for group in self._adam.param_groups:
                group["lr"] = learning_rate
            self._scaler.step(self._adam)
        self._scaler.update(self._constant_scale)
        self._adam.zero_grad()
        return float(norm), not finite

    def move(self, device: torch.device | str) -> None:
        """Move the moments; the parameters are the model's to move. The loss scale's two numbers stay."""
        for state in self._adam.state.values():
            for name, value in state.items():
                # Only a fused Adam counts its steps on the device.
                if isinstance(value, Tensor) and (self._fused or name != "step"):
                    state[name] = value.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        self._scaler.load_state_dict(state["scaler"])
