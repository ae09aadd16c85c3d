"""The accelerator `cuda`: NVIDIA GPUs, asked through the driver's management library (NVML).

NVML answers without a CUDA context, which would cost each asking process some hundred MiB of device memory. The
functions used here are documented at https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from areal.builtins.accelerators.cpu import thread_environment
from areal.contracts.options import Options
from areal.errors import PluginError

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes. Invariant: field order is the driver's."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent. Invariant: field order is the driver's."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class CudaAccelerator:
    """Invariant: no method makes a CUDA context; only workers do, when they first use their device."""

    name = "cuda"
    collective = "nccl"
    resource = "GPU"

    def __init__(self, options: Options | None = None) -> None:
        pass

    def is_available(self) -> bool:
        """Whether torch is built for CUDA and sees a device."""
        return torch.backends.cuda.is_built() and self.count() > 0

    def count(self) -> int:
        """Devices that torch may use; ``CUDA_VISIBLE_DEVICES`` is respected."""
        return torch.cuda.device_count()

    def environment(self, devices: int, threads: int) -> Mapping[str, str]:
        """Threads, and for a worker without a device: none to see."""
        hidden = {} if devices > 0 else {"CUDA_VISIBLE_DEVICES": ""}
        return {**thread_environment(threads), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **hidden}

    def memory(self) -> tuple[int, int]:
        memory = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", memory)
        return memory.used, memory.total

    def utilisation(self) -> float:
        """Return the share of the driver's last sampling period in which a kernel was running."""
        utilization = _Utilization()
        self._ask("nvmlDeviceGetUtilizationRates", utilization)
        return utilization.gpu / 100

    def _ask(self, function: str, answer: ctypes.Structure) -> None:
        """Fill `answer` for the first visible device; PluginError when there is none."""
        library = self._library()
        device = ctypes.c_void_p()
        _check(library.nvmlInit_v2(), "nvmlInit_v2")
        try:
            first = torch.cuda._get_nvml_device_index(0)  # the visible devices' numbering into the driver's
            _check(library.nvmlDeviceGetHandleByIndex_v2(first, ctypes.byref(device)), "nvmlDeviceGetHandleByIndex_v2")
            _check(getattr(library, function)(device, ctypes.byref(answer)), function)
        finally:
            library.nvmlShutdown()

    def _library(self) -> Any:
        if not self.is_available():
            raise PluginError("the accelerator 'cuda' was asked for, but torch sees no CUDA device; use device 'cpu'")
        try:
            return ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise PluginError(f"the accelerator 'cuda' needs {LIBRARY}, part of NVIDIA's driver: {error}") from error


def _check(code: int, function: str) -> None:
    if code != 0:
        raise PluginError(f"NVIDIA's driver answered error {code} to {function}; see nvidia-smi for the device's state")
