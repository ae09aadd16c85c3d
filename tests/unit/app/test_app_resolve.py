"""A recipe's names become components, and what cannot run is refused before anything starts."""

from __future__ import annotations

import pytest

from areal.app.resolve import resolve
from areal.config import RunConfig
from areal.errors import ConfigError
from areal.plugins import discover

PLUGINS = discover()


def test_a_backend_for_one_device_is_not_given_four() -> None:
    config = RunConfig.model_validate({"resources": {"train": {"num_nodes": 2, "gpus_per_node": 2}}})
    with pytest.raises(ConfigError, match="asks for 4 devices and the backend 'torch' trains on one"):
        resolve(config, PLUGINS)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dpo", "dapo"])
def test_one_sample_has_nobody_to_be_compared_with(name: str) -> None:
    config = RunConfig.model_validate({"algorithm": {"name": name, "group_size": 1}})
    with pytest.raises(
        ConfigError, match=f"'algorithm.group_size' is 1 and '{name}', as it is set, compares at least 2"
    ):
        resolve(config, PLUGINS)


@pytest.mark.parametrize("table", [{"name": "reinforce"}, {"name": "ppo"}, {"name": "grpo", "baseline": "none"}])
def test_one_sample_is_enough_without_comparison(table: dict[str, str]) -> None:
    resolve(RunConfig.model_validate({"algorithm": {**table, "group_size": 1}}), PLUGINS)


@pytest.mark.parametrize(
    ("kind", "able"), [("engine", "transformers"), ("backend", "torch")], ids=["engine", "backend"]
)
def test_only_who_gives_its_memory_away_shares_a_device(kind: str, able: str) -> None:
    config = RunConfig.model_validate({"resources": {"shared": True}, kind: {"name": "sim"}})
    said = f"asks the {kind} to give its memory away and 'sim' cannot; use {kind} {able}"
    with pytest.raises(ConfigError, match=said) as caught:
        resolve(config, PLUGINS)
    assert "or leave 'resources.shared' out" in str(caught.value) and "\n" not in str(caught.value)
    resolve(RunConfig.model_validate({"resources": {"shared": True}}), PLUGINS)


def test_the_default_recipe() -> None:
    resolved = resolve(RunConfig.model_validate({}), PLUGINS)
    assert resolved.engine.component.name == "transformers" and resolved.cluster.component.name == "ray"
    assert resolved.algorithm.options.clip_low == 0.2 and resolved.sft.name == "sft"
    assert resolved.model_path == "" and resolved.reshard is None
