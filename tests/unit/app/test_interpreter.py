"""Another interpreter for the engines is asked before anything starts, and refused in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal.app import interpreter
from areal.app.interpreter import find_interpreter, package_of
from areal.app.resolve import resolve
from areal.cli.main import group
from areal.config import RunConfig
from areal.contracts.component import Component
from areal.errors import ArealError, ConfigError, MissingLibrary
from areal.plugins import discover

ENGINE = Component(name="own", factory="areal.builtins.transformers_engine.engine:TransformersEngine")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def script(folder: Path, body: str) -> str:
    """Return an executable that ends as `body` says."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answering(folder: Path, python: list[int] | None = None, **versions: str) -> str:
    """Return an interpreter that claims to be of these versions, and to have every module."""
    there = {
        "python": python or list(sys.version_info[:3]),
        "versions": {name: metadata.version(name) for name in ("areal-core", "ray")}
        | {name.replace("_", "-"): version for name, version in versions.items()},
        "found": {"areal": True},
    }
    return script(folder, f"echo 'words of a sitecustomize'; echo '{json.dumps(there)}'")


def test_an_environment_with_everything(other_python: Path) -> None:
    found = find_interpreter(str(other_python), ENGINE, [package_of(Path())])
    assert found == str(other_python)
    asked = subprocess.run([found, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == str(other_python.parents[1]), "a link that was followed is another environment"


def test_relative_paths_and_the_home_folder(other_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = other_python.parents[1]
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    assert find_interpreter("bin/python", ENGINE, []) == str(other_python)
    assert find_interpreter("~/bin/python", ENGINE, []) == str(other_python)


@pytest.mark.parametrize("given", ["", "bin/nothing", "plain"])
def test_what_is_no_executable(tmp_path: Path, given: str) -> None:
    (tmp_path / "plain").write_text("import sys")
    with pytest.raises(ConfigError, match=r"is no executable; name an interpreter, such as ENV/bin/python$"):
        find_interpreter(str(tmp_path / given), ENGINE, [])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit 3", "cannot be run as a Python of today: it ended with code 3$"),
        ("echo no such library >&2; exit 127", "cannot be run as a Python of today: no such library$"),
        ("echo '[]'", "cannot be run as a Python of today: it ended with code 0$"),
    ],
)
def test_what_is_no_python(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_interpreter(script(tmp_path, body), ENGINE, [])


def test_what_the_system_refuses_and_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(b"\x7fELF, or so it says")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot be run: Exec format error"):
        find_interpreter(str(path), ENGINE, [])
    monkeypatch.setattr(interpreter, "DEADLINE_S", 0.2)
    with pytest.raises(ConfigError, match=r"did not answer within 0\.2 s"):
        find_interpreter(script(tmp_path, "exec sleep 60"), ENGINE, [])


def test_an_empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bare = script(tmp_path, f'exec {sys.executable} -S "$@"')
    with pytest.raises(ConfigError, match=r"has no areal-core; install it with: .*python -m pip install areal-core=="):
        find_interpreter(bare, ENGINE, [])


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"python": [3, 99, 1]}, rf"is Python 3\.99 and this is {HERE}; .* make that environment with Python {HERE}$"),
        ({"areal_core": "99"}, "has areal-core 99 and this environment has .* -m pip install areal-core=="),
        ({"ray": "1.9"}, r"has ray 1\.9 and this environment has .* need the same: .* -m pip install ray=="),
        ({"ray": ""}, r"has no ray; install it with: .* -m pip install ray=="),
    ],
)
def test_other_versions(tmp_path: Path, claims: dict[str, object], said: str) -> None:
    path = answering(tmp_path, **claims)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        find_interpreter(path, ENGINE, [])


def test_another_patch_version_is_welcome(tmp_path: Path) -> None:
    path = answering(tmp_path, python=[*sys.version_info[:2], 99])
    assert find_interpreter(path, ENGINE, []) == path


def test_what_the_other_environment_lacks_is_named(other_python: Path) -> None:
    install = "pip install 'areal-none[all]'"
    plugin = Component(name="none", factory="areal_none.engine:Engine", requires=("none_library",), install=install)
    with pytest.raises(MissingLibrary) as caught:
        find_interpreter(str(other_python), plugin, [])
    where = f"in {other_python}, where it is not"
    assert str(caught.value) == f"engine 'none' needs areal_none {where}; install it there with: {install}"
    with pytest.raises(MissingLibrary, match=r"engine 'own' needs areal_chip in .*; install it there too"):
        find_interpreter(str(other_python), ENGINE, ["areal_chip"])
    needy = Component(name="own", factory=ENGINE.factory, requires=("torch", "no_such.library"))
    with pytest.raises(MissingLibrary, match=r"^'own' needs no_such.library, which is not installed for /"):
        find_interpreter(str(other_python), needy, [])


def test_the_library_is_looked_for_there_and_not_here(
    tmp_path: Path, other_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = f"python{HERE}"
    only_there = other_python.parents[1] / "lib" / version / "site-packages" / "only_there.py"
    only_there.write_text("raise RuntimeError('imported')")
    try:
        needy = Component(name="needy", factory=ENGINE.factory, options=None, requires=("only_there",))
        assert needy.missing() and find_interpreter(str(other_python), needy, [])
        plugins = discover()
        original = plugins.resolve
        monkeypatch.setattr(plugins, "resolve", lambda kind, name: needy if name == "needy" else original(kind, name))
        config = RunConfig.model_validate({"engine": {"name": "needy", "python": str(other_python)}})
        resolved = resolve(config, plugins)
        assert resolved.engine_python == str(other_python) and resolved.engine.component is needy
    finally:
        only_there.unlink()


def test_one_process_has_no_other_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate({"engine": {"python": sys.executable}, "cluster": {"name": "inline"}})
    with pytest.raises(ConfigError, match="needs worker processes and the recipe names the cluster 'inline'"):
        resolve(config, discover())
    monkeypatch.setenv("AREAL_DEBUG_MODE", "1")
    config = RunConfig.model_validate({"engine": {"python": sys.executable}})
    with pytest.raises(ConfigError, match="AREAL_DEBUG_MODE asks for the cluster 'inline'"):
        resolve(config, discover())


def test_a_dry_run_refuses_and_accepts(tmp_path: Path, other_python: Path) -> None:
    refused = CliRunner().invoke(group, ["run", "--dry-run", f"engine.python={tmp_path}"])
    assert isinstance(refused.exception, ArealError | SystemExit) and refused.exit_code
    accepted = CliRunner().invoke(group, ["run", "--dry-run", f"engine.python={other_python}"])
    assert accepted.exit_code == 0 and os.fspath(other_python) in accepted.output
