"""A Hugging Face module as it is trained: its precision, no dropout, activations kept or computed again."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from areal.errors import WorkerFailed

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def stop_dropout(module: nn.Module) -> None:
    """Make training mode equal to evaluation mode; the attention within packed rows never drops anything."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def checkpoint_activations(module: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; WorkerFailed for a model that cannot. Dropout is off already."""
    if not module.supports_gradient_checkpointing:
        raise WorkerFailed(
            f"training.activation_checkpointing is on and {type(module).__name__} cannot do it; turn it off"
        )
    module.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers recomputes in training mode only; nothing else differs, dropout is off.
    module.train()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's random numbers on the CPU and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on from what `random_state` returned."""
    torch.set_rng_state(state["cpu"].cpu())
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].cpu())
