"""Weights that leave their device and come back, for whoever shares it with another process."""

from __future__ import annotations

import torch
from torch import nn

HOST = "cpu"
"""Where what has left its device waits."""


@torch.no_grad()
def move_module(module: nn.Module, device: torch.device | str) -> None:
    """Move parameters and buffers; each stays the same object, so that whoever holds one sees it moved.

    Gradients are not moved: between two updates there are none.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(device)


def free_unused(device: torch.device | str) -> None:
    """Give the memory that this process's allocator keeps for itself to the device's other processes."""
    device = torch.device(device)
    if device.type != HOST:
        torch.get_device_module(device).empty_cache()
