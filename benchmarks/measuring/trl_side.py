"""The other side: TRL's GRPOTrainer in an environment of its own (trl_environment.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.curve import Curve
from measuring.processes import ROOT, run_process
from measuring.trl_environment import trl_variables


def run_trl(
    job: dict[str, Any],
    prompts: Sequence[dict[str, Any]],
    *,
    python: str,
    folder: Path,
    cores: int,
    wait_policy: str,
    deadline_s: float,
) -> Curve:
    """Train on these prompts, in this order, with one thread for each core; `job` is what `trl_train.py` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "curve.jsonl"
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    paths = {"prompts": str(folder / "prompts.jsonl"), "output": str(output), "folder": str(folder)}
    (folder / "job.json").write_text(json.dumps({**job, **paths, "threads": cores}, indent=2), encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT / "benchmarks"), **trl_variables(cores, wait_policy)}
    started, ended = run_process(
        [python, "-m", "measuring.trl_train", str(folder / "job.json")],
        log=folder / "log",
        cores=cores,
        environment=environment,
        deadline_s=deadline_s,
    )
    head, *steps = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    mean = sum(step["tokens_mean"] for step in steps) / len(steps)
    return Curve(
        label="TRL",
        started=started,
        began=head["began"],
        ended=ended,
        times=[step["time"] for step in steps],
        rewards=[step["reward"] for step in steps],
        extra={"tokens_mean": mean, "tokens_max": max(step["tokens_max"] for step in steps)},
    )
