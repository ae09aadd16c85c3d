"""Runs in TRL's own environment: `python trl_losses.py JOBS.json ANSWERS.json`; TRL's losses of given logprobs.

The trainers are TRL's own, made with TRL's own configuration. Only what a model would compute is given: sampled
tokens, logprobs, entropies. Everything from rewards to loss and gradient is TRL's code.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl.rewards import get_soft_overlong_punishment  # noqa: E402
from trl.trainer.utils import split_tensor_dict  # noqa: E402

PADDING = -0.625
"""What stands behind the end of each row; a loss that looks at it is another loss."""
VOCABULARY = 64
TOKEN = 1
GIVEN = ("current", "entropy", "proximal", "reference")


class Rows:
    """The rows of a job as padded tables. Invariant: a row's first input id is its number."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.lengths = [len(row["trained"]) for row in rows]
        self.tables = {name: self._padded([row[name] for row in rows]) for name in GIVEN}
        for name in ("current", "entropy"):
            self.tables[name].requires_grad_()

    def _padded(self, values: Sequence[Sequence[float]]) -> Tensor:
        width = max(self.lengths)
        return torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in values])

    def of(self, name: str, input_ids: Tensor, width: int) -> Tensor:
        """Return the table's rows that these inputs ([B, 1 + width]) are, one column for each id after the first."""
        return self.tables[name][input_ids[:, 0], :width]

    def completions(self) -> list[list[int]]:
        return [[TOKEN] * length for length in self.lengths]

    def gradients(self, loss: Tensor) -> dict[str, list[list[float]]]:
        """Return the loss's gradient by token; none may reach what is behind a row's end."""
        found: dict[str, list[list[float]]] = {}
        for name in ("current", "entropy"):
            (slope,) = torch.autograd.grad(loss, self.tables[name], retain_graph=True, allow_unused=True)
            slope = torch.zeros_like(self.tables[name]) if slope is None else slope
            found[name] = [slope[i, :length].tolist() for i, length in enumerate(self.lengths)]
            assert all(not slope[i, length:].any() for i, length in enumerate(self.lengths))
        return found


class TakesGivenLogprobs:
    """What the two trainers that sample have in common. Invariant: which policy is asked for is seen from the call."""

    given: Rows
    ref_model: Any

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, mask: Tensor, width: int, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        if more.get("compute_entropy"):
            return self.given.of("current", input_ids, width), self.given.of("entropy", input_ids, width), None
        name = "reference" if model is self.ref_model else "proximal"
        return self.given.of(name, input_ids, width), None, None


class GivenGrpo(TakesGivenLogprobs, trl.GRPOTrainer):
    """Invariant: tokens between a row's sampled ones, as a tool writes them, are masked as TRL masks them."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        rows = self.given.rows
        masks, sampled = [row["trained"] for row in rows], [row["behavior"] for row in rows]
        ids = [[i] for i in range(len(rows))]
        return ids, self.given.completions(), masks, prompts, sampled, {}, None, []


class GivenRloo(TakesGivenLogprobs, trl.RLOOTrainer):
    """Invariant: all tokens are trained."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return [[i] for i in range(len(prompts))], self.given.completions(), prompts


def told(reward: list[float | None], **more: Any) -> list[float | None]:
    return reward


def save_model(folder: str) -> None:
    """Save the smallest model that a trainer can be made with; nobody asks it anything."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2").save_pretrained(folder)


def common(folder: str) -> dict[str, Any]:
    return {"output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}


def with_rewards(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return advantages, loss and gradients of a trainer that samples in groups and compares rewards."""
    given = Rows(job["rows"])
    size, parts = len(given.rows), job["parts"]
    trainer_of, config_of = {"grpo": (GivenGrpo, trl.GRPOConfig), "rloo": (GivenRloo, trl.RLOOConfig)}[job["trainer"]]
    settings = {
        "per_device_train_batch_size": size // parts,
        "gradient_accumulation_steps": parts,
        "num_generations": job["group_size"],
        # More than one update with each batch: TRL asks for the policy before them.
        "num_iterations": 2,
        **job["settings"],
    }
    trainer = trainer_of(
        model=folder,
        reward_funcs=told,
        args=config_of(**common(folder), **settings),
        train_dataset=Dataset.from_dict({"prompt": ["0"] * size}),
    )
    trainer.given = given
    trainer.model.train()
    if job["sampler_differs"]:  # without the engine that this means in TRL
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    batch = trainer._generate_and_score_completions([{"prompt": "0", "reward": row["reward"]} for row in given.rows])
    trainer.current_gradient_accumulation_steps = parts
    loss = sum(trainer.compute_loss(trainer.model, part) for part in split_tensor_dict(batch, parts))
    return {"advantages": batch["advantages"].tolist(), "loss": float(loss), **given.gradients(loss)}


class GivenModel:
    """Answers as TRL's models with a fused head do. Invariant: positions that have no label have logprob 0."""

    def __init__(self, given: Rows, name: str) -> None:
        self._given, self._name = given, name

    def __call__(self, *, input_ids: Tensor, labels: Tensor, **more: Any) -> SimpleNamespace:
        mask = labels[:, 1:] != -100
        logprobs = self._given.of(self._name, input_ids, mask.shape[1]) * mask
        zeros = torch.zeros_like(logprobs)
        return SimpleNamespace(
            log_probs=logprobs, label_mask=mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )


def with_preferences(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return DPO's loss of the pairs (better row, worse row), and its gradient."""
    given = Rows(job["rows"])
    text = {"prompt": ["3"], "chosen": ["4"], "rejected": ["5"]}
    args = trl.DPOConfig(**common(folder), **job["settings"])
    trainer = trl.DPOTrainer(model=folder, args=args, train_dataset=Dataset.from_dict(text))
    trainer.ref_model = GivenModel(given, "reference")
    completions = given.completions()
    batch = trainer.data_collator(
        [
            {"prompt_ids": [better], "chosen_ids": completions[better], "rejected_ids": completions[worse]}
            for better, worse in job["pairs"]
        ]
    )
    # The collator writes one prompt before both answers; here the first id says which row it is.
    batch["input_ids"][:, 0] = torch.tensor(job["pairs"]).T.flatten()
    loss = trainer.compute_loss(GivenModel(given, "current"), batch)
    return {"loss": float(loss), **given.gradients(loss)}


def with_answers(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return SFT's loss and its gradient."""
    given = Rows(job["rows"])
    args = trl.SFTConfig(**common(folder), **job["settings"])
    trainer = trl.SFTTrainer(model=folder, args=args, train_dataset=Dataset.from_dict({"text": ["3 4"]}))
    labels = torch.full((len(given.rows), 1 + max(given.lengths)), -100)
    for i, row in enumerate(given.rows):
        labels[i, 1 : 1 + given.lengths[i]] = torch.tensor([TOKEN if trained else -100 for trained in row["trained"]])
    ids = torch.full_like(labels, TOKEN)
    ids[:, 0] = torch.arange(len(given.rows))
    inputs = {"input_ids": ids, "labels": labels}
    loss = trainer.compute_loss(GivenModel(given, "current"), inputs, num_items_in_batch=(labels != -100).sum())
    return {"loss": float(loss), **given.gradients(loss)}


def overlong(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the penalties of answers of these lengths."""
    penalty = get_soft_overlong_punishment(job["limit"], job["buffer"])
    return {"penalties": penalty(completion_ids=[[TOKEN] * length for length in job["lengths"]])}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    doers = {
        "grpo": with_rewards, "rloo": with_rewards, "dpo": with_preferences, "sft": with_answers, "overlong": overlong
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        answers = {name: doers[job["trainer"]](job, folder) for name, job in jobs.items()}
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
