"""The engine's contract as tests: subclass `EngineConformance` and say how your engine is made.

    class TestMyEngine(EngineConformance):
        kv_on_update = "keep"

        @classmethod
        def make_engine(cls, model_path):
            return MyEngine(MyOptions(), EngineContext(model=ModelSpec(path=model_path), ...))

The kit writes tiny float32 models (`areal.testing.models`), starts one engine for each, and pushes weight updates
through a folder (`areal.testing.transfer`), so that engines in processes of their own pass the same tests. Every
wait has a deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import pytest

from areal.contracts.engine import Engine, ReportsLoad
from areal.contracts.messages import Completion, GenerateRequest, Sampling
from areal.contracts.transfer import Layout, checksum
from areal.errors import ArealError, TransferFailed
from areal.testing.models import EOS, tiny_model
from areal.testing.reference import Reference, Weights
from areal.testing.transfer import FOLDER_RESHARDER

T = TypeVar("T")
