"""`areal conformance`: the kit from the shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal.cli.conformance import which
from areal.cli.main import group
from areal.contracts.component import Component, import_object
from areal.errors import MissingLibrary, PluginError, UnknownComponent
from areal.plugins import KINDS, discover
from areal.testing import runner


def conformance(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal.cli.main", "conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder)


def test_a_component_that_keeps_its_contract() -> None:
    ended = conformance("accelerator/cpu", "-q")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout and "failed" not in ended.stdout


def test_a_component_that_breaks_it(tmp_path: Path) -> None:
    code = "class Liar:\n    def __init__(self, options, context): pass\n"
    code += "    def prompts(self, split): return []\n    def episode(self, prompt, client): return 1\n"
    (tmp_path / "liar.py").write_text(code)
    # From the user's own folder, where the class lies.
    ended = conformance("environment/liar:Liar", "-q", "-x", folder=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed" in ended.stdout


@pytest.mark.parametrize(
    ("component", "case"),
    [
        ("engine/transformers", "start_returns_how"),
        ("backend/torch", "it_is_a_backend"),
        ("resharder/disk", "a_plan_without_engines"),
        ("environment/reverse_digits", "splits_are_disjoint"),
    ],
)
def test_every_kit_runs_from_the_shell(component: str, case: str) -> None:
    ended = conformance(component, "-q", "-k", case)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout


def test_options_reach_the_component(tmp_path: Path) -> None:
    code = "from areal.contracts.options import Options\nclass PickyOptions(Options):\n    level: int = 1\n"
    code += "class Picky:\n    def __init__(self, options, context): raise ValueError(f'level {options.level}')\n"
    code += "    def prompts(self, split): ...\n    def episode(self, prompt, client): ...\n"
    (tmp_path / "picky.py").write_text(code)
    arguments = ("environment/picky:Picky", "-q", "-x", "--option")
    assert "ValueError: level 7" in conformance(*arguments, "level=7", folder=tmp_path).stdout
    refused = conformance(*arguments, "level=high", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: environment 'picky:Picky' does not take the option 'level': ")


@pytest.mark.parametrize("kind", runner.KITS)
def test_what_is_written_is_a_subclass_of_the_kit(kind: str) -> None:
    component = Component(name="my-own 1", factory="nowhere:Mine")
    scope: dict[str, type] = {}
    exec(runner._written(kind, component, {}), scope)
    assert issubclass(scope["TestMyOwn1"], import_object(runner.KITS[kind]))


def test_an_engine_that_says_what_it_does_with_its_cache_is_held_to_it() -> None:
    engine = discover().resolve("engine", "transformers")
    assert "    kv_on_update = 'recompute'\n" in runner._written("engine", engine, {"kv_on_update": "recompute"})
    silent = Component(name="silent", factory="a:B")
    assert "    kv_on_update = None\n" in runner._written("engine", silent, {})


def test_a_name_alone_is_enough_when_one_kind_has_it() -> None:
    assert which("xccl", discover()) == ("resharder", "xccl")
    assert which("engine/x", discover()) == ("engine", "x")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownComponent, match=r"no component named 'xxcl'; .*; did you mean 'xccl'\?"):
        which("xxcl", discover())
    with pytest.raises(UnknownComponent, match=r"no kind 'engin'; there are .*; did you mean 'engine'\?"):
        which("engin/transformers", discover())


def test_a_kind_without_kit_is_refused() -> None:
    for kind in KINDS.keys() - runner.KITS.keys():
        with pytest.raises(PluginError, match=f"no conformance kit for {kind} 'x'; kits: engine, backend, "):
            runner.run_conformance(kind, Component(name="x", factory="a:B"), {})


def test_without_pytest_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "pytest" else object())
    with pytest.raises(MissingLibrary, match=r"needs pytest, which is not installed; .*'areal-core\[test\]'"):
        runner.run_conformance("engine", Component(name="x", factory="a:B"), {})


@pytest.mark.parametrize(
    ("option", "sentence"),
    [("digits", "--option 'digits' is not of the form KEY=VALUE"), ("a=[", "--option a: '[' is not a YAML value")],
)
def test_an_option_that_cannot_be_read(option: str, sentence: str) -> None:
    result = CliRunner().invoke(group, ["conformance", "reverse_digits", "--option", option])
    assert (result.exit_code, result.stderr) == (2, f"error: {sentence}\n")
