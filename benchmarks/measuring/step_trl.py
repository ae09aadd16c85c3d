"""One process of TRL's GRPOTrainer for train_vs_trl.py, in TRL's own environment: a step of a fixed batch when told to.

`rollout_func`, TRL's own door for rollouts from elsewhere, gives it answers that are there already, so that it
generates nothing. Several processes are told of each other by the variables that `accelerate launch` sets, and TRL
makes of them what it makes on CPUs: a copy of the model each, and gradients averaged by gloo (DistributedDataParallel).
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from measuring.peer import parent
from measuring.processes import status
from measuring.step_batches import read
from measuring.trl_train import optimizer, settings

BATCHES_AHEAD = 1000
"""The prompts stand in the data set so many times: its end would cost time in a step."""


class Trainer(GRPOTrainer):
    """Invariant: the clock starts when a step's tensors are ready: padding, decoding and rewards are not in it."""

    began = cpu_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        ready = super()._generate_and_score_completions(inputs)
        self.cpu_s, self.began = -time.process_time(), time.perf_counter()
        return ready


class Steps(TrainerCallback):
    """Where the trainer waits for word between two steps. Invariant: each "step" is answered when it is logged."""

    def __init__(self, connection: Any, job: dict[str, Any]) -> None:
        self._connection = connection
        self._batches = read(job["batches"])
        self._is_first = job["rank"] == 0
        self.trainer: Trainer
        self._clock: dict[str, float] = {}

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the rows that belong to this process's prompts, which are numbers of groups; EOFError: no more."""
        case = self._next()
        seen: Counter[str] = Counter()
        rows: list[dict[str, Any]] = []
        for prompt in prompts:
            rows.append([row for row in self._batches[case] if row["group"] == int(prompt)][seen[prompt]])
            seen[prompt] += 1
        names = {"prompt_ids": "prompt_ids", "completion_ids": "answer_ids", "given": "reward"}
        return {"logprobs": None, **{name: [row[ours] for row in rows] for name, ours in names.items()}}

    def _next(self) -> str:
        while True:
            method, *arguments = self._connection.recv()
            if method == "step":
                return arguments[0]
            self._connection.send(getattr(self, method)(*arguments))

    def aim(self, case: str) -> None:
        """Without vLLM, TRL takes the current weights for those that sampled."""

    def peak(self) -> float:
        """Return the most memory that this process had, MiB."""
        return status("VmHWM")

    def save(self, folder: str) -> str:
        """Write the weights as Hugging Face does, and return where."""
        if self._is_first:
            Path(folder).mkdir(parents=True, exist_ok=True)
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            weights = {name: weight.detach() for name, weight in model.named_parameters()}
            save_file(weights, Path(folder) / "model.safetensors")
        return folder

    def on_step_end(self, *args: Any, **more: Any) -> None:
        ended, cpu_s = time.perf_counter(), self.trainer.cpu_s + time.process_time()
        self._clock = {"began": self.trainer.began, "ended": ended, "cpu_s": cpu_s}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        if logs and "grad_norm" in logs:
            figures = {name: float(logs[name]) for name in ("loss", "grad_norm")}
            self._connection.send({**self._clock, **figures})


def given(given: list[float], **more: Any) -> list[float]:
    """Return the rewards that came with the rollouts."""
    return given


def main() -> None:
    connection, _ = parent()
    (job,) = connection.recv()
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    steps = Steps(connection, job)
    groups = [str(group) for group in range(job["batch_size"])]
    steps.trainer = Trainer(
        model=model,
        reward_funcs=given,
        args=settings(job),
        train_dataset=Dataset.from_dict({"prompt": groups * BATCHES_AHEAD}),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[steps],
        optimizers=optimizer(job, model),
        rollout_func=steps.rollout,
    )
    torch.set_num_threads(job["threads"])
    connection.send("ready")
    try:
        steps.trainer.train()
    except EOFError:
        return  # the other end hung up


if __name__ == "__main__":
    main()
