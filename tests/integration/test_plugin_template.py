"""The plugin template is built, installed beside AReaL, and used like anybody's plugin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from areal import API

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin-template"
Run = Callable[..., subprocess.CompletedProcess[str]]
# Cases of the engine kit that go through every method of the wrapper; the wrapped engine passes all of them elsewhere.
KIT_CASES = "TestContract and (start or right_token or repeated)"
COMPONENT = """
from areal import Component, hookimpl

@hookimpl
def areal_{hook}():
    return [Component(name={name!r}, factory="nowhere:Nobody", api={api})]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the template, and nothing else."""
    source = shutil.copytree(TEMPLATE, tmp_path_factory.mktemp("source") / "plugin")
    target = tmp_path_factory.mktemp("site")
    # With the build backend at hand nothing has to be fetched.
    offline = ["--no-build-isolation"] if find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *offline, "--target", str(target)]
    subprocess.run([*command, str(source)], check=True, timeout=240)
    return target


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Run:
    """Return run(*command): Python with the template's folder, and the test's own, on its path."""

    def run(*command: str, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(site), str(tmp_path)])
        environment = dict(os.environ) | {"PYTHONPATH": path, "COLUMNS": "80"} | variables
        ended = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            env=environment,
            timeout=290,
            check=False,
            cwd=tmp_path,
        )
        assert ended.returncode == expect, ended.stdout + ended.stderr
        return ended

    return run


def install(folder: Path, name: str, code: str) -> None:
    """Leave in `folder` what pip would: a module, and the metadata of its distribution areal-NAME 1.0."""
    (folder / f"hooks_of_{name}.py").write_text(code)
    info = folder / f"areal_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: areal-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[areal]\n{name} = hooks_of_{name}\n")


def rows(run: Run, *arguments: str, **variables: str) -> dict[str, dict[str, Any]]:
    listed = json.loads(run("areal.cli.main", "plugins", "--json", *arguments, **variables).stdout)
    return {row["name"]: row for row in listed}


def test_the_template_is_loaded_with_what_it_offers(run: Run) -> None:
    example = rows(run)["example"]
    assert (example["distribution"], example["version"], example["state"]) == ("areal-example", "0.1.0", "loaded")
    assert example["hooks"] == ["areal_engines", "areal_environments"]
    assert [(offer["kind"], offer["name"], offer["obstacle"]) for offer in example["offers"]] == [
        ("engine", "delayed", ""),
        ("environment", "sort_digits", ""),
    ]


def test_a_recipe_names_what_it_offers(run: Run) -> None:
    arguments = ["environments.0.name=sort", "environments.0.type=sort_digits", "environments.0.digits=3"]
    resolved = run("areal.cli.main", "config", *arguments, "--engine", "delayed", "engine.delay_s=0.5").stdout
    assert "type: sort_digits" in resolved and "name: delayed" in resolved and "delay_s: 0.5" in resolved
    refused = run("areal.cli.main", "config", *arguments, "environments.0.digits=0", expect=2).stderr
    assert refused.startswith("error: ") and "digits" in refused


def test_a_run_uses_its_engine_and_its_task(run: Run, tmp_path: Path) -> None:
    few = ["training.max_steps=2", "training.batch_size=4", "evaluation.num_prompts=4"]
    brief = ["training.warmup.steps=2", "training.warmup.batch_size=8", "algorithm.group_size=4"]
    plugin = ["--engine", "delayed", "environments.0.name=sort", "environments.0.type=sort_digits"]
    ended = run("areal.cli.main", "run", "--cluster", "inline", *plugin, *few, *brief, f"runs_dir={tmp_path / 'runs'}")
    assert "step 2/2" in ended.stdout
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len([step for step in steps if 0.0 <= step.get("reward/mean", -1.0) < 1.0]) == 2


def test_its_own_tests_pass(run: Run) -> None:
    settings = ["-c", str(TEMPLATE / "pyproject.toml"), "-q", "-p", "no:cacheprovider"]
    tests = TEMPLATE / "tests"
    assert " passed" in run("pytest", *settings, str(tests / "test_sort_digits.py")).stdout
    cases = ["-k", f"({KIT_CASES}) or not TestContract"]
    assert " passed" in run("pytest", *settings, *cases, str(tests / "test_delayed.py")).stdout


def test_every_fate_of_a_plugin_is_a_row_and_a_sentence(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "broken", "import no_such_library")
    install(tmp_path, "blocked", "open('imported', 'w').close()")
    install(tmp_path, "misspelt", "from areal import hookimpl\n@hookimpl\ndef areal_trakcers():\n    return []\n")
    install(tmp_path, "future", COMPONENT.format(hook="engines", name="warp", api=API + 1))
    install(tmp_path, "twin", COMPONENT.format(hook="engines", name="delayed", api=API))
    found = rows(run, "--block", "areal-blocked")
    for ours in ("vllm", "fsdp2"):  # the environment may have AReaL's own plugins
        found.pop(ours, None)
    assert {name: row["state"] for name, row in found.items()} == {
        "builtin": "loaded",
        "blocked": "blocked",
        "broken": "broken",
        "example": "loaded",
        "future": "broken",
        "misspelt": "broken",
        "twin": "loaded",
    }
    assert found["broken"]["reason"] == "ModuleNotFoundError: No module named 'no_such_library'"
    assert found["blocked"]["reason"] == "--block areal-blocked"
    assert not (tmp_path / "imported").exists()
    assert found["misspelt"]["reason"] == "'areal_trakcers' is no hook; did you mean 'areal_trackers'?"
    assert f"'warp' is made for hook API {API + 1}, and this AReaL has API {API}" in found["future"]["reason"]
    duplicate = "engine 'delayed' is offered by areal-example 0.1.0 and by areal-twin 1.0"
    assert duplicate in found["twin"]["offers"][0]["obstacle"]
    assert {row["state"] for row in rows(run, AREAL_BLOCK="blocked").values()} == {"loaded", "blocked", "broken"}


def test_asking_for_what_cannot_be_had_quotes_the_reason(run: Run, tmp_path: Path) -> None:
    install(tmp_path, "broken", "import no_such_library")
    install(tmp_path, "twin", COMPONENT.format(hook="engines", name="delayed", api=API))

    def asked(name: str) -> str:
        return run("areal.cli.main", "conformance", f"engine/{name}", expect=2).stderr

    assert asked("broken") == (
        "error: no engine named 'broken'; the plugin areal-broken 1.0 is broken: "
        "ModuleNotFoundError: No module named 'no_such_library'\n"
    )
    assert asked("delayed") == (
        "error: engine 'delayed' is offered by areal-example 0.1.0 and by areal-twin 1.0; "
        "keep one and --block the other\n"
    )
