"""Ray's memory monitor kills a worker that takes too much: the report says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).parent


def test_out_of_memory_is_the_reason(tmp_path: Path) -> None:
    memory = psutil.virtual_memory()
    if memory.available < memory.total / 4:
        pytest.skip("less than a quarter of this machine's memory is free")
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "RAY_AUTH_TOKEN": "f" * 64}
    command = [sys.executable, str(FOLDER / "memory_hog.py"), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert "out of memory: Ray's memory monitor killed it because its node" in ended.stdout, ended.stdout + ended.stderr
