"""Processes that several files share: starting them takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsdp2_trainers import Trainers

from areal.testing.models import tiny_model


@pytest.fixture(scope="session")
def two() -> Iterator[Trainers]:
    trainers = Trainers(2)
    yield trainers
    trainers.ranks.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Trainers]:
    trainers = Trainers(4)
    yield trainers
    trainers.ranks.close()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with four heads and two key-value heads, which tensor parallelism of 2 can slice."""
    return tiny_model(tmp_path_factory.mktemp("fsdp2-model"), hidden=128)
