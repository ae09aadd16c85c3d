"""`--address` of `areal run` and `areal resume`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from areal.cli.main import group


def call(*arguments: str) -> Result:
    return CliRunner().invoke(group, arguments)


@pytest.mark.parametrize("cluster", [[], ["--cluster", "ray"]])
def test_it_becomes_the_clusters_option(cluster: list[str]) -> None:
    result = call("run", "--dry-run", *cluster, "--address", "10.0.0.1:6379")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.output)["cluster"]["address"] == "10.0.0.1:6379"


def test_a_cluster_without_addresses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "error: --address auto names a cluster to join and the cluster 'inline' joins none; use --cluster ray"
    result = call("run", "--dry-run", "--cluster", "inline", "--address", "auto")
    assert result.exit_code == 2 and result.output.startswith(said)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "run" / "journal.sqlite").touch()
    monkeypatch.setenv("AREAL_DEBUG_MODE", "1")
    result = call("resume", str(tmp_path / "run"), "--address", "auto")
    assert result.exit_code == 2 and result.output.startswith(said), result.output
