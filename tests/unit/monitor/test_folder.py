"""A run's folder: made once, found again by path, by name or as the latest."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from areal.errors import ConfigError, JournalError
from areal.monitor.folder import RunFolder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-120000")


@pytest.mark.usefixtures("noon")
def test_a_new_folder(here: Path) -> None:
    folder = RunFolder.create("deep/runs", "math", "seed: 1 # é\n")
    assert folder.path == here / "deep/runs/math-20260102-120000"
    assert folder.config.read_text(encoding="utf-8") == "seed: 1 # é\n"
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "logs"]
    assert folder.journal == folder.path / "journal.sqlite"
    assert folder.checkpoints == folder.path / "checkpoints" and folder.model == folder.path / "model"


def test_only_one_controller_at_a_time() -> None:
    first = RunFolder.create("runs", "math", "")
    second = RunFolder.find(str(first.path), "runs")
    first.lock()
    with pytest.raises(JournalError, match=f"is still going on in process {os.getpid()}; wait for its end or stop it"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_file_system_without_locks_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("areal.monitor.folder.fcntl.flock", refuse)
    folder = RunFolder.create("runs", "math", "")
    folder.lock()
    folder.unlock()
    assert "cannot be locked (No locks available)" in caplog.text


def test_a_folder_that_is_gone_cannot_be_locked() -> None:
    with pytest.raises(JournalError, match="cannot be written: No such file or directory"):
        RunFolder(Path("nowhere")).lock()


@pytest.mark.usefixtures("noon")
def test_runs_of_the_same_second_have_folders_of_their_own() -> None:
    names = [RunFolder.create("runs", "math", "").path.name for _ in range(3)]
    assert names == [f"math-20260102-120000{suffix}" for suffix in ("", "-2", "-3")]


@pytest.mark.usefixtures("noon")
def test_too_many_runs_of_one_name() -> None:
    for _ in range(99):
        RunFolder.create("runs", "math", "")
    with pytest.raises(ConfigError, match=r"has 99 runs named 'math-20260102-120000'; .* another name with name=NAME"):
        RunFolder.create("runs", "math", "")


def test_a_place_where_nothing_can_be_made(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs_dir 'file': Not a directory; give another one with runs_dir=FOLDER"):
        RunFolder.create("file", "math", "")
    with pytest.raises(ConfigError, match=r"could not be made in runs_dir '/proc/runs'"):
        RunFolder.create("/proc/runs", "math", "")


def test_finding(here: Path) -> None:
    old, new = (RunFolder.create("runs", name, "") for name in ("old", "new"))
    os.utime(new.config, (1, 1))  # not the name decides, but the time
    assert RunFolder.find(str(old.path), "elsewhere").path == old.path
    assert RunFolder.find(f"runs/{old.path.name}", "elsewhere").path == old.path
    assert RunFolder.find(new.path.name, "runs").path == new.path
    assert RunFolder.find("latest", "runs").path == old.path
    assert RunFolder.find("latest", "runs").path.is_absolute()
    (here / "runs/latest").mkdir()
    (here / "runs/latest/config.yaml").write_text("")
    os.utime(here / "runs/latest/config.yaml", (2, 2))
    assert RunFolder.find("latest", "runs").path == old.path, "the word goes before a folder of that name"


def test_a_run_that_is_not_there(here: Path) -> None:
    with pytest.raises(JournalError, match=r"^no run 'latest' here or in 'runs'; it has no runs$"):
        RunFolder.find("latest", "runs")
    name = RunFolder.create("runs", "math", "").path.name
    (here / "runs" / "notes").mkdir()
    with pytest.raises(JournalError, match=rf"^no run 'x' here or in 'runs'; it has {name}$"):
        RunFolder.find("x", "runs")
    wrong = name[:-1] + "x"
    with pytest.raises(JournalError, match=rf"it has {name}; did you mean '{name}'\?$"):
        RunFolder.find(wrong, "runs")
