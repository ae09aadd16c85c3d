"""What plugins tell `areal doctor`, each in a process of its own, and what becomes of those who cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal.contracts.finding import Finding
from areal.monitor import doctor
from areal.monitor.probe import ask_plugin
from areal.plugins import discover

Install = Callable[[str, str], str]
HEAD = """
from areal import hookimpl
from areal.contracts.finding import Finding

@hookimpl
def areal_findings():
"""
PATCH = Finding(topic="good", name="patch", state="absent", detail="slow", command="pip install patch")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return install(name, body of areal_findings): an installed plugin, and the name by which it is called."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def install(name: str, body: str) -> str:
        (tmp_path / f"areal_{name}_hooks.py").write_text(f"{HEAD}    {body}\n")
        info = tmp_path / f"areal_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: areal-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[areal]\n{name} = areal_{name}_hooks\n")
        return f"areal-{name}/{name}"

    yield install
    for module in tmp_path.glob("*.py"):
        sys.modules.pop(module.stem, None)


def test_what_a_plugin_found(install: Install) -> None:
    library = "import atexit; atexit.register(print, 'the last words of a library')"
    name = install("good", f"{library}; return (finding for finding in [{PATCH!r}])")
    assert ask_plugin(name) == [PATCH]
    assert ask_plugin(install("quiet", "return None")) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no driver')", "areal_findings raised RuntimeError: no driver"),
        ("raise SystemExit(3)", "areal_findings raised SystemExit: 3"),
        ("return ['a patch']", "areal_findings raised TypeError: 'a patch' is no areal.contracts.finding.Finding"),
        ("return [Finding(topic='x', name='x', state='fine', detail='x')]", "state='fine', detail='x'"),
        ("return 7", "areal_findings raised TypeError: 'int' object is not iterable"),
        ("import os; os.abort()", "asking it for findings ended the process by SIGABRT"),
        ("import os; os._exit(7)", "asking it for findings ended the process with code 7"),
    ],
)
def test_what_goes_wrong_is_the_finding(install: Install, body: str, said: str) -> None:
    name = install("bad", body)
    (found,) = ask_plugin(name)
    assert (found.topic, found.name, found.state, found.is_required) == ("plugins", name, "broken", False)
    assert said in found.detail and found.detail.endswith("what it knows of its library is not in this report")


def test_one_that_hangs_is_given_up_on(install: Install) -> None:
    (found,) = ask_plugin(install("bad", "import time; time.sleep(60)"), deadline_s=3.0)
    assert found.state == "broken" and "did not end within 3 s" in found.detail


def test_a_crash_takes_nothing_of_the_report_with_it(install: Install) -> None:
    bad, good = install("bad", "import os; os.abort()"), install("good", f"return [{PATCH!r}]")
    assert {bad, good} <= {name for name, _ in discover().calls("areal_findings")}
    findings = doctor.diagnose().findings
    assert PATCH in findings
    states = {finding.name: finding.state for finding in findings}
    assert (states[bad], states["torch"]) == ("broken", "ok")


def test_a_blocked_plugin_is_not_asked(install: Install) -> None:
    name = install("bad", "raise AssertionError('asked')")
    assert all(finding.name != name for finding in doctor.diagnose(["bad"]).findings)
