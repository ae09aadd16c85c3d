"""The process that scores: it may hang, crash or vanish, and the run goes on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areal.builtins.tasks.scoring import Scorer

SCORERS = """
import os, subprocess, sys, tempfile, time

def right(text): return {"reward": 1.0, "length": float(len(text))}
def not_a_number(text): return {"reward": float("nan")}
def raises(text): raise RuntimeError("first line\\nsecond line")
def dies(text): os._exit(7)
def by_text(text):
    if text == "hang":
        while True: pass
    return {"reward": float(text)}
def with_child(text):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(text, "w") as file: file.write(str(child.pid))
    time.sleep(600)
def writes(text):
    print("noise on the standard output")
    return {"reward": 1.0, "inside": float(os.path.dirname(tempfile.mkstemp()[1]) == tempfile.gettempdir())}
"""


@pytest.fixture
def scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scorers_under_test.py").write_text(SCORERS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "scorers_under_test"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is dead; it only waits for its parent.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.glob("areal-scorer-*/*"))


async def test_a_reward_and_metrics_come_back(scorers: str):
    outcome = await Scorer(f"{scorers}:right", 20).score(text="four")
    assert (outcome.status, outcome.reward, outcome.metrics) == ("ok", 1.0, {"length": 4.0})


async def test_calls_share_one_process_and_keep_apart(scorers: str):
    scorer = Scorer(f"{scorers}:by_text", 20)
    outcomes = await asyncio.gather(*(scorer.score(text=str(number)) for number in range(200)))
    assert [outcome.reward for outcome in outcomes] == list(range(200))
    pid = scorer.pid
    await scorer.score(text="1")
    assert scorer.pid == pid


async def test_a_call_that_hangs_is_a_timeout_and_the_next_one_works(scorers: str):
    scorer = Scorer(f"{scorers}:by_text", 0.5)
    assert (await scorer.score(text="3")).reward == 3
    pid = scorer.pid
    assert pid is not None
    started = time.monotonic()
    hung, later = await asyncio.gather(scorer.score(text="hang"), scorer.score(text="4"))
    assert hung.status == "timeout" and "0.5 s" in hung.detail and hung.reward is None
    assert later.reward == 4
    assert not alive(pid) and time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("raises", "RuntimeError: first line second line"),
        ("not_a_number", "the reward is nan"),
        ("dies", "exit code 7"),
        ("absent", "has no 'absent'"),
    ],
)
async def test_failures_are_errors_and_never_a_reward(scorers: str, function: str, detail: str):
    outcome = await Scorer(f"{scorers}:{function}", 20).score(text="")
    assert outcome.status == "error" and outcome.reward is None
    assert detail in outcome.detail and "\n" not in outcome.detail


async def test_a_killed_process_is_replaced(scorers: str):
    scorer = Scorer(f"{scorers}:by_text", 20)
    await scorer.score(text="1")
    assert scorer.pid is not None
    os.kill(scorer.pid, signal.SIGKILL)
    assert (await scorer.score(text="1")).status == "error"
    assert (await scorer.score(text="2")).reward == 2


async def test_what_the_scorer_started_dies_with_it(scorers: str, tmp_path: Path):
    note = tmp_path / "pid"
    outcome = await Scorer(f"{scorers}:with_child", 3).score(text=str(note))
    assert outcome.status == "timeout"
    await asyncio.sleep(0.5)  # its new parent, init, reaps it
    assert not alive(int(note.read_text()))


async def test_output_and_temporary_files_disturb_nobody(scorers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scorer: Any = Scorer(f"{scorers}:writes", 20)
    for _ in range(2):
        outcome = await scorer.score(text="")
        assert (outcome.reward, outcome.metrics) == (1.0, {"inside": 1.0})
    assert len(temporary_files(tmp_path)) == 2
    pid = scorer.pid
    del scorer
    await asyncio.sleep(0.1)  # the scorer's thread lets go of it a moment after the outcome is there
    gc.collect()
    assert not alive(pid)
    assert not temporary_files(tmp_path)


def test_nothing_is_left_of_a_killed_parent(scorers: str, tmp_path: Path):
    files = tmp_path / "temporary"
    files.mkdir()
    program = f"""
import asyncio, os
from areal.builtins.tasks.scoring import Scorer
scorer = Scorer("{scorers}:writes", 20)
asyncio.run(scorer.score(text=""))
print(scorer.pid, len(os.listdir("{files}")), flush=True)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "TMPDIR": str(files)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()[1]) == (-9, "1"), ended.stderr
    end = time.monotonic() + 20
    while list(files.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(files.iterdir()) == []
