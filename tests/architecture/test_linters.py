"""Linters and the type checker are part of the suite, so that `make test` is everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from figures import ROOT


def _run(*command: str) -> None:
    # pyright's launcher would ask its package index whether a newer one exists.
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    program = Path(sys.executable).with_name(command[0])
    result = subprocess.run(
        [str(program), *command[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing() -> None:
    _run("ruff", "check", "--no-cache")


def test_the_code_is_formatted() -> None:
    _run("ruff", "format", "--check", "--no-cache")


@pytest.mark.timeout(600)
def test_the_types_are_right() -> None:
    _run("pyright", "--pythonpath", sys.executable)
