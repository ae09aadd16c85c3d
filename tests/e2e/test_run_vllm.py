"""`areal run --engine vllm` from an environment without vLLM: engines run in the one that `make test-vllm` makes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from run_processes import Processes, consumption, finish, run_folder, start, steps_of, wait_for_step, worker_pid

from areal.testing.models import tiny_model

PYTHON = Path(__file__).parents[2] / ".venvs" / "vllm" / "bin" / "python"
SMALL = (
    "training.batch_size=4",
    "algorithm.group_size=4",
    "sampling.max_new_tokens=24",
    "evaluation.every_steps=0",
    "trackers=[jsonl]",
    "--engine=vllm",
    f"engine.python={PYTHON}",
    "engine.kv_cache_memory_bytes=67108864",
)
STEPS = 60

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM here: make test-vllm brings it")


def checked(folder: Path) -> Path:
    run = run_folder(folder)
    assert steps_of(run) == list(range(1, STEPS + 1))
    trained, _ = consumption(run)
    assert len(trained) == len({group for group, _ in trained}) == 4 * STEPS
    return run


def test_a_killed_vllm_is_replaced_and_the_run_goes_on(tmp_path: Path, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, f"training.max_steps={STEPS}", "engine.replicas=2", "parity.every_steps=4")
    processes.append(process)
    wait_for_step(tmp_path, 2, process)
    os.kill(worker_pid(run_folder(tmp_path), "engine-0"), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert "vLLM" in (checked(tmp_path) / "logs" / "engine-1.log").read_text(), "vLLM's own words are in the log"


def test_a_killed_rank_ends_its_engine_and_no_more(tmp_path: Path, processes: Processes) -> None:
    model = tiny_model(tmp_path / "model", hidden=128)
    process = start(
        tmp_path,
        "run",
        *SMALL,
        f"training.max_steps={STEPS}",
        f"model.path={model}",
        "resources.infer.num_gpus=2",
        "resources.infer.parallel=tp",
    )
    processes.append(process)
    wait_for_step(tmp_path, 2, process)
    engine = psutil.Process(worker_pid(run_folder(tmp_path), "engine-0"))
    ranks = [child for child in engine.children(recursive=True) if child.name().startswith("VLLM::Worker_TP")]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert (checked(tmp_path) / "logs" / "engine-1.log").exists()
    said = " ".join(output.split())
    # Whoever notices first says it in its own words: the cluster, or the update that ran.
    assert re.search(r"engine-0 was lost and is replaced: (engine-0 died: )?vLLM of engine 'engine-0' stopped: ", said)


def test_what_vllm_refuses_ends_the_run_in_one_sentence(tmp_path: Path, processes: Processes) -> None:
    process = start(tmp_path, "run", *SMALL, "engine.max_num_seq=4")
    processes.append(process)
    output = finish(process)
    assert process.returncode != 0
    assert "vLLM does not take the option 'max_num_seq' of 'engine'; did you mean 'max_num_seqs'?" in " ".join(
        output.split()
    )
    assert "Traceback" not in output
