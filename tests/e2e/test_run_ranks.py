"""`areal run` with a trainer of two ranks: one is killed, one is stopped, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from run_processes import SMALL, Processes, consumption, finish, run_folder, start, steps_of, wait_for_step, worker_pid
from test_run_failures import names, workers

TOY = Path(__file__).parents[1] / "integration"
sys.path.append(str(TOY))
from toy_ranks import as_plugin  # noqa: E402 -- it lies beside the tests that need it most

RANKS = (
    "backend.name=toy",
    "resources.train.num_gpus=2",
    "checkpoint.every_steps=2",
    "staleness.max=0",
    "failures.hang_timeout_s=4",
)


def losses(run: Path) -> list[str]:
    with sqlite3.connect(run / "journal.sqlite") as journal:
        return [worker for (worker,) in journal.execute("SELECT worker FROM failures ORDER BY id")]


@pytest.mark.timeout(600)
def test_a_trainer_of_two_ranks_is_lost_and_replaced_as_one(tmp_path: Path, processes: Processes) -> None:
    as_plugin(tmp_path / "plugin")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "plugin"), str(TOY)])}
    process = start(tmp_path, "run", *SMALL, *RANKS, "training.max_steps=4000", **variables)
    processes.append(process)
    wait_for_step(tmp_path, 3, process)
    run = run_folder(tmp_path)
    there = names(tmp_path)
    assert there.pop("trainer-0") == there.pop("trainer-0.1") == "working" and len(there) == 2
    code, said = workers(tmp_path, "remove", "latest", "trainer-0.1")
    assert code != 0 and "trainer-0.1 belongs to the trainer, without which no run goes on" in " ".join(said.split())
    os.kill(worker_pid(run, "trainer-0.1"), signal.SIGKILL)
    wait_for_step(tmp_path, max(steps_of(run)) + 4, process)
    os.kill(worker_pid(run, "trainer-1.1"), signal.SIGSTOP)
    wait_for_step(tmp_path, max(steps_of(run)) + 4, process)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    assert losses(run) == ["trainer-0.1", "trainer-1.1"]
    said = " ".join(output.split())
    assert re.search(r"trainer-0\.1 was lost and is replaced: trainer-0\.1( died)?: killed from outside", said), output
    assert "trainer-1.1 was lost and is replaced: trainer-1.1 gave no sign of life for 4 s" in said, output

    done = max(steps_of(run))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("max_steps: 4000", f"max_steps: {done + 2}"))
    process = start(tmp_path, "resume", **variables)
    processes.append(process)
    output = finish(process)
    assert process.returncode == 0, output
    assert max(steps_of(run)) == done + 2 and not list((run / "checkpoints").glob("*.tmp"))
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * (done + 2)


def test_an_adapter_that_no_engine_serves_is_refused_at_the_start(tmp_path: Path, processes: Processes) -> None:
    lora = ("backend.name=fsdp2", "backend.lora.rank=4", "backend.lora.publish=adapter")
    process = start(tmp_path, "run", *SMALL, *lora)
    processes.append(process)
    output = finish(process)
    said = "error: the trainer publishes a LoRA adapter of rank 4 and engine 'transformers' as it is set serves no LoRA"
    assert process.returncode == 2 and said in output, output
    assert not list(run_folder(tmp_path).glob("checkpoints/*"))
