"""Processes that several files share: starting them takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from expert_ranks import moe_model
from fsdp2_trainers import Trainers

from areal.testing.models import character_tokenizer, tiny_model


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


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of experts, to be spread over ranks."""
    folder = tmp_path_factory.mktemp("fsdp2-moe")
    moe_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)
