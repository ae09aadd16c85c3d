"""The builtin training backend passes the kit that plugins are held to."""

from __future__ import annotations

import pytest

from areal.builtins.hooks import areal_backends
from areal.contracts.component import Component
from areal.testing.backend import BackendConformance


class TestTorch(BackendConformance):
    @pytest.fixture
    def component(self) -> Component:
        (component,) = [offered for offered in areal_backends() if offered.name == "torch"]
        return component
