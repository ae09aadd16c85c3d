"""Runs in TRL's own environment: `python -m measuring.trl_train JOB.json`.

It writes one JSON line when it begins and one for each step.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from measuring.rewards import REWARDS  # noqa: E402


class Recorder(TrainerCallback):
    """Writes the curve. Invariant: a line stands for a finished optimizer step."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115

    def on_train_begin(self, *args: Any, **more: Any) -> None:
        self._write(began=time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        if logs and "reward" in logs:
            self._write(
                step=state.global_step,
                time=time.time(),
                reward=logs["reward"],
                tokens_mean=logs["completions/mean_length"],
                tokens_max=logs["completions/max_length"],
                learning_rate=logs.get("learning_rate"),
            )

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def dataset(job: dict[str, Any], tokenizer: Any) -> Dataset:
    """Return the other side's prompts in their order; refuse them when they would be tokenised differently here."""
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    texts = [render(row["messages"], tokenizer) for row in rows]
    for row, ids in zip(rows, tokenizer(text=texts)["input_ids"], strict=True):
        if list(ids) != row["prompt_ids"]:
            raise SystemExit(f"prompt {row['messages']} has the ids {list(ids)} here and {row['prompt_ids']} there")
    columns = {"environment": [row["environment"] for row in rows], "answer": [row["answer"] for row in rows]}
    return Dataset.from_dict({"prompt": texts, **columns})


def render(messages: list[dict[str, str]], tokenizer: Any) -> str:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return "".join(message["content"] for message in messages)


def optimizer(job: dict[str, Any], model: torch.nn.Module) -> tuple[Any, Any]:
    """Return AdamW and the schedule of the recipe: a linear rise, then constant, or linear down to 0."""
    adam = torch.optim.AdamW(
        model.parameters(), lr=job["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    warmup, last = job["lr_warmup_steps"], job["steps"] - 1

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        return max(0.0, 1 - (update - warmup) / max(1, last - warmup)) if job["schedule"] == "linear" else 1.0

    return adam, torch.optim.lr_scheduler.LambdaLR(adam, factor)


def settings(job: dict[str, Any]) -> GRPOConfig:
    samples = job["batch_size"] * job["group_size"]
    return GRPOConfig(
        output_dir=str(Path(job["folder"]) / "trl"),
        max_steps=job["steps"],
        per_device_train_batch_size=samples // job["accumulation"] // job.get("processes", 1),
        gradient_accumulation_steps=job["accumulation"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=job["bf16"],
        seed=job["seed"],
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)

    def reward(completion_ids: Any, environment: Any, answer: Any, **more: Any) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        ended = [bool(ids) and ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [REWARDS[name](*sample) for name, *sample in zip(environment, texts, answer, ended, strict=True)]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(job),
        train_dataset=dataset(job, tokenizer),
        processing_class=tokenizer,
        callbacks=[Recorder(job["output"])],
        optimizers=optimizer(job, model),
    )
    trainer.train()


if __name__ == "__main__":
    main()
