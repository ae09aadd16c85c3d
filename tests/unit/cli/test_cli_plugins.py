"""The group `areal`, `areal plugins` and `areal components`, as a user types them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from areal import __version__
from areal.cli import main as cli
from areal.plugins import KINDS

pytestmark = pytest.mark.usefixtures("only_core")

Install = Callable[[str, str], None]
HELP_BUDGET_S = 0.4
OFFER = """
from areal import Component, hookimpl

@hookimpl
def areal_engines():
    return [Component(name="fast", factory="nowhere:Engine", summary="Very fast.", requires=("no_such_lib",),
                      install="pip install 'fast[lib]'")]
"""
COMMANDS = """
import click
from areal import hookimpl
from areal.errors import ConfigError

@hookimpl
def areal_commands(group):
    @group.command()
    def greet():
        "Greet the user."
        click.echo("hello")

    @group.command()
    def fail():
        raise ConfigError("no such thing")

    @group.command()
    def interrupt():
        raise KeyboardInterrupt

    @group.command()
    def plugins():
        click.echo("replaced")
"""


@pytest.fixture(autouse=True)
def own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a plugin of one test adds are gone in the next."""
    monkeypatch.setattr(cli.group, "commands", {})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return install(name, code): a plugin of the distribution areal-NAME."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def install(name: str, code: str) -> None:
        modules.append(f"hooks_of_{name}")
        (tmp_path / f"hooks_of_{name}.py").write_text(code)
        info = tmp_path / f"areal_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: areal-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[areal]\n{name} = hooks_of_{name}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def areal(*arguments: str, width: int = 80) -> Result:
    return CliRunner().invoke(cli.group, arguments, env={"COLUMNS": str(width)}, prog_name="areal")


def test_every_command_stands_in_the_help() -> None:
    result = areal("--help", width=120)
    assert result.exit_code == 0
    for name in cli.COMMANDS:
        assert f"│ {name} " in result.output


def test_the_version_is_the_packages() -> None:
    assert areal("--version").output == f"areal {__version__}\n"


def test_help_stays_within_its_budget() -> None:
    # CPU time, because other work only makes wall time longer. It makes this longer too, by shared caches and clocks:
    # the best try is the quietest, and a machine with more work than cores cannot tell.
    code = "from areal.cli.main import main; import sys; sys.argv[1:] = ['--help']; main()"
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if spent_s <= HELP_BUDGET_S:
            return
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip(f"this machine is busy: areal --help took {spent_s:.2f} s of CPU time")
    pytest.fail(f"areal --help took {spent_s:.2f} s of CPU time, {HELP_BUDGET_S} s are allowed")


def test_the_list_tells_state_reason_and_the_command_that_helps(install: Install) -> None:
    install("fast", OFFER)
    install("bad", "import no_such_library")
    result = areal("plugins", "--block", "builtin", width=200)
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert "builtin areal-core 0.1.0 blocked --block builtin" in lines
    assert "bad areal-bad 1.0 broken ModuleNotFoundError: No module named 'no_such_library'" in lines
    assert "fast areal-fast 1.0 loaded engine: fast" in lines
    assert "'fast' needs no_such_lib, which is not installed; install it with: pip install 'fast[lib]'" in lines


@pytest.mark.parametrize("command", ["plugins", "components"])
def test_a_narrow_table_loses_nothing(install: Install, command: str) -> None:
    install("fast", OFFER)
    result = areal(command, width=80)
    assert max(map(len, result.output.splitlines())) <= 80
    # The last column holds the sentence; put together again, it is whole.
    words = " ".join(result.output.split())
    for word in ("fast", "areal-fast", "no_such_lib,", "'fast[lib]'"):
        assert word in words


def test_plugins_as_json(install: Install) -> None:
    install("fast", OFFER)
    install("bad", "1 / 0")
    rows = {row["name"]: row for row in json.loads(areal("plugins", "--json").output)}
    assert set(rows) == {"builtin", "fast", "bad"}
    assert rows["bad"] == {
        "name": "bad",
        "distribution": "areal-bad",
        "version": "1.0",
        "state": "broken",
        "reason": "ZeroDivisionError: division by zero",
        "hooks": [],
        "offers": [],
    }
    assert rows["fast"]["offers"] == [
        {
            "kind": "engine",
            "name": "fast",
            "summary": "Very fast.",
            "missing": ["no_such_lib"],
            "install": "pip install 'fast[lib]'",
            "obstacle": "'fast' needs no_such_lib, which is not installed; install it with: pip install 'fast[lib]'",
        }
    ]


def test_every_component_has_a_summary() -> None:
    offers = json.loads(areal("components", "--json").output)
    assert {offer["kind"] for offer in offers} == set(KINDS)
    assert all(offer["summary"].endswith(".") and "\n" not in offer["summary"] for offer in offers)


@pytest.mark.parametrize("kind", ["cluster", "clusters"])
def test_one_kind_of_components(kind: str) -> None:
    offers = json.loads(areal("components", "--kind", kind, "--json").output)
    assert [(offer["kind"], offer["name"]) for offer in offers] == [
        ("cluster", "inline"),
        ("cluster", "ray"),
        ("cluster", "sim"),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("components", "--kind", "engin"), "error: no kind 'engin'; there are engine, "),
        (("plugins", "--block", "x"), "error: --block x names no plugin; installed: areal-core, builtin\n"),
        (("fail",), "error: no such thing\n"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(install: Install, arguments: tuple[str, ...], sentence: str) -> None:
    if arguments == ("fail",):
        install("more", COMMANDS)
    result = areal(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(install: Install) -> None:
    install("more", COMMANDS)
    assert type(areal("--debug", "fail").exception).__name__ == "ConfigError"


def test_an_interrupt_is_exit_code_130(install: Install) -> None:
    install("more", COMMANDS)
    assert areal("interrupt").exit_code == 130


def test_plugins_add_commands_and_replace_none(install: Install) -> None:
    install("more", COMMANDS)
    assert "Greet the user." in areal("--help").output
    assert areal("greet").output == "hello\n"
    assert "replaced" not in areal("plugins").output


def test_a_plugin_whose_commands_fail_costs_only_them(install: Install) -> None:
    install("bad", "from areal import hookimpl\n@hookimpl\ndef areal_commands(group):\n    1 / 0")
    install("more", COMMANDS)
    assert areal("greet").output == "hello\n"
    assert areal("--help").exit_code == 0


def test_an_unknown_command_is_a_usage_error() -> None:
    result = areal("rum")
    assert result.exit_code == 2
    assert "No such command 'rum'" in result.output


def test_help_is_shown_even_when_a_block_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_BLOCK", "nobody")
    assert areal("--help").exit_code == 0
    result = areal("greet")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: AREAL_BLOCK=nobody names no plugin; installed: areal-core, builtin\n",
    )
