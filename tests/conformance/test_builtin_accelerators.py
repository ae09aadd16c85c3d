"""The builtin accelerators pass the kit that plugins are held to."""

from __future__ import annotations

import pytest

from areal.contracts.component import Component
from areal.testing.accelerator import AcceleratorConformance


class TestCpu(AcceleratorConformance):
    @pytest.fixture
    def component(self) -> Component:
        return Component(name="cpu", factory="areal.builtins.accelerators.cpu:CpuAccelerator")


class TestCuda(AcceleratorConformance):
    @pytest.fixture
    def component(self) -> Component:
        return Component(name="cuda", factory="areal.builtins.accelerators.cuda:CudaAccelerator")
