"""The builtin resharders pass the kit that plugins are held to."""

from __future__ import annotations

from typing import Any

import pytest

from areal.contracts.component import Component
from areal.testing.resharder import ResharderConformance


class TestDisk(ResharderConformance):
    @pytest.fixture
    def component(self) -> Component:
        path = "areal.builtins.resharders.disk"
        return Component(name="disk", factory=f"{path}:DiskResharder", options=f"{path}:DiskOptions")


class TestXcclSharedMemory(ResharderConformance):
    @pytest.fixture
    def component(self) -> Component:
        path = "areal.builtins.resharders.xccl"
        return Component(name="xccl", factory=f"{path}:XcclResharder", options=f"{path}:XcclOptions")


class TestXcclGloo(TestXcclSharedMemory):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"shared_memory": "never", "bucket_bytes": 1_000_001}
