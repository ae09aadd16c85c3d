"""The tasks that both sides of a comparison are given."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from measuring.areal_side import run_areal
from measuring.processes import areal_command

ADDITION = {"name": "addition", "type": "measuring.tasks:Addition"}
SHOWN_ADDITION = {"name": "shown_addition", "type": "measuring.tasks:ShownAddition", "weight": 7}
COUNTING = {"name": "counting", "type": "measuring.tasks:Counting", "weight": 1}
PATIENCE_S = 900.0
"""Three steps' samples are under way at a time, and a machine need not be quiet."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task and all its numbers. Invariant: `recipe` and `trl_job` say the same thing in two languages."""

    title: str
    model: Literal["tiny", "smollm2"]
    environments: Sequence[dict[str, Any]]
    """Named after their rewards in `rewards.py`."""
    batch_size: int
    """Prompts of a step."""
    group_size: int
    steps: int
    learning_rate: float
    schedule: Literal["constant", "linear"]
    """After the rise; linear ends at 0."""
    lr_warmup_steps: int
    max_new_tokens: int
    bf16: bool = False
    """Both sides: master weights in float32, computing in bfloat16; see `with_precision`."""
    micro_batch_tokens: int
    accumulation: int
    """TRL's micro-batches a step, the fewest that 24 GB of memory allow."""
    bar: float
    """The reward that "seconds to the same reward" asks for."""
    window: int
    """Steps that rewards are averaged over."""

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "float32"

    def with_precision(self, precision: str) -> Case:
        """Return the case in the given precision, for ``auto`` in the one that is fast here; tiny is float32 always."""
        fast = precision == "bf16" or (precision == "auto" and has_bf16())
        return replace(self, bf16=fast and self.model != "tiny")

    def recipe(self, model: str, seed: int, steps: int) -> dict[str, Any]:
        """Return our side's recipe; `model` is a Hugging Face folder."""
        return {
            "name": self.model,
            "seed": seed,
            "model": {"path": model, "dtype": "bfloat16" if self.bf16 else "float32"},
            "environments": list(self.environments),
            "training": {
                "batch_size": self.batch_size,
                "max_steps": steps,
                "learning_rate": self.learning_rate,
                "schedule": self.schedule,
                "min_lr_ratio": 0.0,
                "lr_warmup_steps": self.lr_warmup_steps,
                "micro_batch_tokens": self.micro_batch_tokens,
                "amp": {"enabled": self.bf16, "dtype": "bf16"},
            },
            "algorithm": {"name": "grpo", "group_size": self.group_size},
            "sampling": {"max_new_tokens": self.max_new_tokens, "temperature": 1.0},
            "rollout": {"episode_timeout_s": PATIENCE_S},
            "failures": {"quiet_time_s": PATIENCE_S},
            "checkpoint": {"every_steps": 0},
        }

    def trl_job(self, model: str, seed: int, steps: int) -> dict[str, Any]:
        """Return what `trl_train.py` reads; prompts and paths come on top."""
        names = ("batch_size", "group_size", "learning_rate", "schedule", "lr_warmup_steps", "max_new_tokens", "bf16")
        values = {name: getattr(self, name) for name in (*names, "accumulation")}
        return {"model": model, "seed": seed, "steps": steps, **values}


CASES = {
    "a": Case(
        title="tiny model, reverse 4 digits, 16 prompts x 16 samples, 5 new tokens",
        model="tiny",
        environments=[{"name": "reversing", "type": "reverse_digits"}],
        batch_size=16,
        group_size=16,
        steps=400,
        learning_rate=4e-4,
        schedule="linear",
        lr_warmup_steps=10,
        max_new_tokens=5,
        micro_batch_tokens=16384,
        accumulation=1,
        bar=0.9,
        window=10,
    ),
    "b": Case(
        title="SmolLM2-135M, add two digits, 8 prompts x 8 samples, 12 new tokens",
        model="smollm2",
        environments=[ADDITION],
        batch_size=8,
        group_size=8,
        steps=25,
        learning_rate=2e-5,
        schedule="constant",
        lr_warmup_steps=5,
        max_new_tokens=12,
        micro_batch_tokens=16384,
        accumulation=1,
        bar=0.6,
        window=5,
    ),
    "c": Case(
        title="SmolLM2-135M, 7 prompts add and 1 counts, x 8 samples, at most 120 new tokens",
        model="smollm2",
        environments=[SHOWN_ADDITION, COUNTING],
        batch_size=8,
        group_size=8,
        steps=15,
        learning_rate=2e-5,
        schedule="constant",
        lr_warmup_steps=5,
        max_new_tokens=120,
        micro_batch_tokens=2048,
        accumulation=4,
        bar=0.6,
        window=5,
    ),
}

ARITHMETIC = replace(
    CASES["b"],
    title="SmolLM2-135M, add two digits, the numbers of recipes/smollm2_arithmetic.yaml",
    steps=40,
    schedule="linear",
    max_new_tokens=16,
)
"""No side of TRL's: the recipe's task without the library reasoning_gym, which vLLM's environment lacks."""


def has_bf16() -> bool:
    """Whether the processor has bfloat16 matrix products; without them bfloat16 is slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def initial_model(case: Case, smollm2: str | None, *, folder: Path, seed: int, cores: int) -> str:
    """Return the Hugging Face folder that every side of a case starts from; `smollm2`: where that one is, if known."""
    if case.model == "tiny":
        return _warmed_tiny(folder, seed, cores)
    return str(Path(smollm2).absolute()) if smollm2 else pulled_smollm2()


def pulled_smollm2() -> str:
    command = [*areal_command(), "models", "pull", "smollm2"]
    pulled = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if pulled.returncode:
        raise SystemExit("SmolLM2 could not be fetched; with its folder at hand use --smollm2 FOLDER")
    return pulled.stdout.strip().splitlines()[-1]


def _warmed_tiny(folder: Path, seed: int, cores: int) -> str:
    """Make the tiny model of `areal run` as it is after the supervised warm-up, before the first rollout."""
    model = folder / "tiny-model"
    if not (model / "config.json").is_file():
        print("the tiny model, after its supervised warm-up:", flush=True)
        arguments = [f"seed={seed}", "training.max_steps=1", "evaluation.every_steps=0"]
        _, run = run_areal(
            "warm-up", None, arguments, folder=folder / "warm-up", cores=cores, deadline_s=600.0, keep=True
        )
        shutil.copytree(run / "checkpoints" / "step-00000000" / "model", model)
    return str(model)
