"""A recipe's names become components, and what cannot run is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

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


MANY = """
from areal import Component, hookimpl

@hookimpl
def areal_backends():
    return [Component(name="many", factory="nowhere:Nobody", capabilities=frozenset({"distributed"}))]
"""


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_are_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    info = tmp_path / "areal_many-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-many\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[areal]\nmany = hooks_of_many\n")
    (tmp_path / "hooks_of_many.py").write_text(MANY)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {"resources": {"train": {"num_gpus": 2}}, "backend": {"name": "many"}}
    resolve(RunConfig.model_validate(table), discover())
    if debug:
        monkeypatch.setenv("AREAL_DEBUG_MODE", "1")
    config = RunConfig.model_validate(table if debug else {**table, "cluster": {"name": "inline"}})
    why = "AREAL_DEBUG_MODE asks for" if debug else "the recipe names"
    said = f"asks for 2 devices, one process each, and {why} the cluster 'inline', which is one process; ask for one"
    with pytest.raises(ConfigError, match=said):
        resolve(config, discover())


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
