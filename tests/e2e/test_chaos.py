"""A small `benchmarks/chaos.py`: everything is killed, and nothing is lost, used twice or missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.timeout(900)
def test_a_run_bears_a_handful_of_kills(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(CHAOS), "--order", "engine,scorer,trainer,stopped rollout,added,node"]
    done = subprocess.run(
        [
            *command,
            "--spacing",
            "2",
            "--calm",
            "10",
            "--bar",
            "0",
            "--folder",
            str(tmp_path / "chaos"),
            "--out",
            str(figures),
        ],
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(figures.read_text())
    assert found["broken"] == [] and found["audit"] == "lost 0, twice 0, missing 0"
    assert found["blows by kind"] == {
        "added": 1, "controller": 1, "engine": 1, "node": 1, "scorer": 1, "stopped rollout": 1, "trainer": 1
    }  # fmt: skip
    assert found["resumes"] == 2 and found["workers lost (journal)"] >= 3 and found["snapshots"] >= 7
