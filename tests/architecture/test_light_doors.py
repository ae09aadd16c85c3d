"""Whatever a user waits for at the prompt imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "ray", "vllm", "sglang", "torch_npu"}
# Not forbidden by the design, and yet each costs more than the whole of `areal --help` may.
SLOW = {"pydantic", "matplotlib", "tensorboard", "numpy"}


def imported_by(code: str) -> set[str]:
    """Run `code` in a fresh process and return the top-level modules it has imported at its end."""
    # The hook runs at exit, so that code which ends in SystemExit is measured too.
    measured = (
        "import atexit, json, sys\n"
        "names = lambda: json.dumps(sorted({module.split('.')[0] for module in sys.modules}))\n"
        "atexit.register(lambda: sys.stderr.write('\\n' + names()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", measured + code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stderr.splitlines()[-1]))


def command_line(*arguments: str) -> str:
    return f"import sys; sys.argv = ['areal', *{arguments!r}]; from areal.cli.main import main; main()"


@pytest.mark.parametrize("module", ["areal", "areal.plugins", "areal.cli.main", "areal.builtins.hooks"])
def test_a_door_is_light(module: str) -> None:
    assert not imported_by(f"import {module}") & (HEAVY | SLOW)


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("plugins",), ("plugins", "--json"), ("components",)]
)
def test_a_command_is_light(arguments: list[str]) -> None:
    assert not imported_by(command_line(*arguments)) & (HEAVY | SLOW)


@pytest.mark.parametrize("command", ["run", "resume", "config", "models", "doctor", "conformance"])
def test_the_help_of_a_heavy_command_is_light(command: str) -> None:
    assert not imported_by(command_line(command, "--help")) & (HEAVY | SLOW)


def test_reading_a_recipe_leaves_torch_to_the_workers() -> None:
    assert not imported_by(command_line("run", "--dry-run")) & (HEAVY - {"ray"})
    assert not imported_by(command_line("algorithms")) & HEAVY


def test_a_heavy_import_would_be_seen() -> None:
    assert "decimal" in imported_by("import decimal")
