"""Full disks, damaged journals and checkpoints: one sentence, exit code 2, and `areal resume` loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import measuring
import pytest
from run_processes import Processes, consumption, finish, run_folder, start, steps_of, wait_for_step

INLINE = (
    "device=cpu",
    "cluster.name=inline",
    "training.batch_size=2",
    "algorithm.group_size=4",
    "training.warmup.steps=2",
    "evaluation.every_steps=0",
    "parity.prompts=0",
    "trackers=[jsonl]",
)
AUDIT = Path(measuring.__file__).with_name("audit.py")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB of its own: room for a few checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def failed_in_a_sentence(process: subprocess.Popen[str], *parts: str) -> str:
    output = finish(process)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("error: ") and all(part in last for part in parts), output
    return last


def nothing_is_lost(run: Path, snapshot: Path) -> None:
    command = [sys.executable, str(AUDIT), str(run), "--snapshot", str(snapshot)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def resumed(folder: Path, steps: int) -> None:
    process = start(folder, "resume")
    output = finish(process)
    assert process.returncode == 0, output
    trained, _ = consumption(run_folder(folder))
    assert sorted({step for _, step in trained}) == list(range(1, steps + 1))
    assert len(trained) == len({group for group, _ in trained}) == 2 * steps


def test_a_checkpoint_that_has_no_room(disk: Path, tmp_path: Path) -> None:
    process = start(disk, "run", *INLINE, "training.max_steps=40", "checkpoint={every_steps: 5, keep: 30}")
    failed_in_a_sentence(
        process, "/checkpoints/step-000000", "cannot be written: ", "the one before stays", "areal resume"
    )
    run = run_folder(disk)
    there = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(there) > 2 and not [name for name in there if name.endswith(".tmp")]
    nothing_is_lost(run, tmp_path / "snapshot")
    failed_in_a_sentence(start(disk, "resume"), "cannot be written: ")
    nothing_is_lost(run, tmp_path / "snapshot")
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    resumed(disk, 40)
    nothing_is_lost(run, tmp_path / "snapshot")


def test_a_journal_that_has_no_room(disk: Path, tmp_path: Path, processes: Processes) -> None:
    process = start(disk, "run", *INLINE, "training.max_steps=60", "checkpoint={every_steps: 8, keep: 2}")
    processes.append(process)
    wait_for_step(disk, 11, process)
    filler = disk / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(2**16))
            file.flush()
    failed_in_a_sentence(process, "cannot be written: ", "areal resume")
    run = run_folder(disk)
    failed_in_a_sentence(start(disk, "resume"), "areal resume")
    filler.unlink()
    nothing_is_lost(run, tmp_path / "snapshot")
    resumed(disk, 60)
    nothing_is_lost(run, tmp_path / "snapshot")


@pytest.mark.parametrize("size", ["8k", "200k", "3m"])
def test_a_run_that_has_no_room_from_the_start(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
    process = start(disk, "run", *INLINE, "training.max_steps=2")
    failed_in_a_sentence(process)
    failed_in_a_sentence(start(disk, "resume"))


def test_damaged_and_missing_journals_and_checkpoints(tmp_path: Path) -> None:
    process = start(tmp_path, "run", *INLINE, "training.max_steps=3", "checkpoint={every_steps: 1, keep: 2}")
    assert finish(process) and process.returncode == 0
    run = run_folder(tmp_path)
    journal = run / "journal.sqlite"
    raw = journal.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"\0" * len(raw), raw[:4096] + bytes(4096) + raw[8192:]):
        journal.write_bytes(damaged)
        failed_in_a_sentence(start(tmp_path, "resume"), "journal.sqlite", "is damaged: ")
        assert journal.read_bytes() == damaged
    journal.write_bytes(b"\0" * len(raw))
    failed_in_a_sentence(start(tmp_path, "replay", "--step", "3"), "journal.sqlite", "is damaged: ")
    journal.write_bytes(raw)
    state = run / "checkpoints" / "step-00000003" / "trainer.pt"
    flipped = bytearray(state.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    state.write_bytes(flipped)
    process = start(tmp_path, "resume")
    output = finish(process)
    assert process.returncode == 0 and "trainer.pt is not what was saved" in output, output
    assert set(steps_of(run)) == {1, 2, 3}
    for checkpoint in (run / "checkpoints").glob("*/trainer.pt"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:-7])
    failed_in_a_sentence(start(tmp_path, "resume"), "none of the checkpoints")
    journal.unlink()
    failed_in_a_sentence(start(tmp_path, "resume"), "has no journal, so there is nothing to resume")


def test_a_step_of_worker_processes_is_replayed(tmp_path: Path, processes: Processes) -> None:
    """With the trainer in a process of its own, while the run goes on, and once it has ended."""
    recipe = (*(part for part in INLINE if not part.startswith("cluster")), "checkpoint={every_steps: 2, keep: 500}")
    process = start(tmp_path, "run", *recipe, "training.max_steps=4000", "training.minibatches=2")
    processes.append(process)
    wait_for_step(tmp_path, 7, process)
    running = start(tmp_path, "replay", "--step", "6")
    output = finish(running)
    assert running.returncode == 0 and "step 6, from the checkpoint of step 4" in output, output
    assert process.poll() is None
    process.terminate()
    finish(process)
    ended = start(tmp_path, "replay", "--step", "4")
    output = finish(ended)
    assert ended.returncode == 0 and output.splitlines()[-1] == "step 4 is the same, bit for bit", output
    metrics = run_folder(tmp_path) / "metrics.jsonl"
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
