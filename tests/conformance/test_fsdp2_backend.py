"""The backend `fsdp2` passes the backend kit on two ranks, whatever they are used for."""

from __future__ import annotations

from typing import Any

import pytest

from areal.contracts.component import Component
from areal.testing.backend import BackendConformance
from areal.testing.backend_ranks import OnRanks
from areal_fsdp2.hooks import areal_backends


class Fsdp2Conformance(OnRanks, BackendConformance):
    @pytest.fixture
    def component(self) -> Component:
        (component,) = areal_backends()
        return component


class TestDataParallel(Fsdp2Conformance):
    pass


class TestTensorParallel(Fsdp2Conformance):
    hidden = 128  # two key-value heads

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"tp": 2}


class TestSequenceParallel(Fsdp2Conformance):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"sp": 2}


class TestPipelineParallel(Fsdp2Conformance):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"pp": 2}
