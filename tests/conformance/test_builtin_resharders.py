"""The builtin resharders pass the kit that plugins are held to."""

from __future__ import annotations

from typing import Any

import pytest

from areal.builtins.hooks import areal_resharders
from areal.contracts.component import Component
from areal.testing.resharder import ResharderConformance


def offered(name: str) -> Component:
    return next(component for component in areal_resharders() if component.name == name)


class TestDisk(ResharderConformance):
    @pytest.fixture
    def component(self) -> Component:
        return offered("disk")


class TestXcclSharedMemory(ResharderConformance):
    @pytest.fixture
    def component(self) -> Component:
        return offered("xccl")


class TestXcclGloo(TestXcclSharedMemory):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"shared_memory": "never", "bucket_bytes": 1_000_001}


class TestXcclDelta(TestXcclSharedMemory):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"shared_memory": "never", "bucket_bytes": 1_000_001, "delta": "always"}
