"""The other side: TRL's GRPOTrainer in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring.curve import Curve
from measuring.processes import ROOT, run_process

VENV = ROOT / ".venvs" / "trl"
TORCH, TRL = "2.13.0", "1.16.0"
SCRIPT = Path(__file__).with_name("trl_train.py")


def trl_python(given: str | None) -> str:
    """Return the interpreter that TRL is installed in; without one given, `VENV`'s, made now if need be."""
    python = given or str(VENV / "bin" / "python")
    if given is None and _trl_version(python) != TRL:
        _make_venv()
    found = _trl_version(python)
    if found != TRL:
        raise SystemExit(f"{python} has TRL {found or 'not at all'}, this benchmark is written for {TRL}")
    return python


def _trl_version(python: str) -> str:
    if not Path(python).exists():
        return ""
    code = "from importlib.metadata import version; print(version('trl'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def _make_venv() -> None:
    """Install TRL beside us: the same torch and the same transformers on both sides."""
    print(f"making {VENV} with TRL {TRL} (about 1.5 GB)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, f"trl=={TRL}", f"transformers=={metadata.version('transformers')}"], check=True)


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
    environment = {
        "OMP_NUM_THREADS": str(cores),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_WAIT_POLICY": "PASSIVE"} if wait_policy == "passive" else {}),
    }
    started, ended = run_process(
        [python, str(SCRIPT), str(folder / "job.json")],
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
