"""One rank of an AReaL backend for train_vs_trl.py, in a process that makes a step of a fixed batch when told to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areal.algorithms.grpo import Grpo
from areal.builtins.accelerators.cpu import CpuAccelerator
from areal.builtins.torch_backend.backend import TorchBackend
from areal.builtins.torch_backend.options import TorchBackendOptions
from areal.contracts.messages import Batch, Row
from areal.contracts.specs import AmpSpec, BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options
from measuring.peer import parent
from measuring.processes import status
from measuring.step_batches import read

BACKENDS: dict[str, Any] = {"torch": (TorchBackend, TorchBackendOptions), "fsdp2": (Fsdp2Backend, Fsdp2Options)}


class Rank:
    """Invariant: a row's behaviour logprobs are those of the weights at the last `aim`."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        training = TrainingSpec(
            learning_rate=job["learning_rate"],
            micro_batch_tokens=job["micro_batch_tokens"],
            amp=AmpSpec(enabled=job["bf16"], dtype="bf16"),
        )
        context = BackendContext(
            model=ModelSpec(path=job["model"], dtype="float32"),
            training=training,
            accelerator=CpuAccelerator(),
            seed=job["seed"],
            rank=job["rank"],
            devices=TrainerDevices(world_size=job["processes"], per_node=job["processes"]),
            rendezvous=job["rendezvous"] if job["processes"] > 1 else "",
        )
        backend, options = BACKENDS[job["backend"]]
        self._backend = backend(options(**job["options"]), context)
        self._backend.start()
        self._algorithm = Grpo()
        self._batches = {name: batch_of(rows) for name, rows in read(job["batches"]).items()}

    def aim(self, case: str) -> None:
        """Let the current weights be those that sampled the case's answers; not part of any clock."""
        batch = self._batches[case]
        sampled = zip(batch.rows, self._backend.logprobs(batch), strict=True)
        self._batches[case] = replace(batch, rows=tuple(replace(row, logprobs=own) for row, own in sampled))

    def step(self, case: str) -> dict[str, float]:
        """Make an update; `began` and `ended` are seconds on the machine's monotonic clock."""
        cpu_s, began = -time.process_time(), time.perf_counter()
        found = self._backend.train_step(self._batches[case], self._algorithm)
        self._backend.layout()  # waits for an update that goes on beside the next work: it belongs to the step
        ended, cpu_s = time.perf_counter(), cpu_s + time.process_time()
        clock = {"began": began, "ended": ended, "cpu_s": cpu_s}
        return {**clock, "loss": found["loss"], "grad_norm": found["grad_norm"]}

    def peak(self) -> float:
        """Return the most memory that this process had, MiB."""
        return status("VmHWM")

    def save(self, folder: str) -> str:
        """Write the weights as Hugging Face does, and return where."""
        self._backend.save(folder)
        if finish := getattr(self._backend, "finish_save", None):
            finish()
        return str(Path(folder) / "model")


def batch_of(rows: list[dict[str, Any]]) -> Batch:
    made = tuple(row_of(row) for row in rows)
    return Batch(rows=made, num_tokens=sum(row.num_loss_tokens for row in made), num_sequences=len(made))


def row_of(row: dict[str, Any]) -> Row:
    prompt, answer = row["prompt_ids"], row["answer_ids"]
    return Row(
        token_ids=(*prompt, *answer),
        loss_mask=(False,) * len(prompt) + (True,) * len(answer),
        logprobs=(0.0,) * (len(prompt) + len(answer)),
        versions=(-1,) * len(prompt) + (0,) * len(answer),
        advantages=(0.0,) * len(prompt) + (row["advantage"],) * len(answer),
        group=row["group"],
    )


def main() -> None:
    connection, _ = parent()
    (job,) = connection.recv()
    rank = Rank(job)
    connection.send("ready")
    while True:
        try:
            method, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(rank, method)(*arguments))


if __name__ == "__main__":
    main()
