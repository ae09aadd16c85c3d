"""The accelerator: what core may know about a chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Accelerator(Protocol):
    """Made as ``factory(options)``; picklable. Invariant: asking never initialises a device in this process."""

    name: str
    """torch's device type: ``cpu``, ``cuda``, ``npu``."""
    collective: str
    """torch.distributed backend: ``gloo``, ``nccl``, ``hccl``."""
    resource: str
    """What a cluster calls one device: ``GPU``, ``NPU``; empty for the CPU, which workers share."""

    def is_available(self) -> bool: ...

    def count(self) -> int:
        """Devices on this machine; for the CPU, its usable cores."""
        ...

    def environment(self, devices: int, threads: int) -> Mapping[str, str]:
        """Variables a worker process needs before torch is imported, for so many devices and CPU threads."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return (used, total) bytes of the first device."""
        ...

    def utilisation(self) -> float:
        """Return busy share of the first device, 0..1."""
        ...
