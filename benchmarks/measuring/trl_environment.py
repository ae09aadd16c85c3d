"""TRL's own environment: its pins are not ours. The benchmarks and the test that compares with TRL share it."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser
from importlib import metadata
from pathlib import Path

from measuring.processes import ROOT

VENV = ROOT / ".venvs" / "trl"
TORCH, TRL = "2.13.0", "1.16.0"
MAKING_S = 1800.0
"""Time that fetching and installing 1.5 GB may take."""
ANSWERING_S = 60.0


def trl_python(given: str | None = None, *, making_s: float = MAKING_S) -> str:
    """Return the interpreter that TRL is installed in; without one given, `VENV`'s, made now if need be."""
    python = given or str(VENV / "bin" / "python")
    if given is None and _trl_version(python) != TRL:
        _make_venv(python, time.monotonic() + making_s)
    found = _trl_version(python)
    if found != TRL:
        raise SystemExit(f"{python} has TRL {found or 'not at all'}, this is written for {TRL}")
    return python


def add_trl_arguments(parser: ArgumentParser) -> None:
    """Let the user say which Python TRL runs in, and how its threads wait."""
    parser.add_argument("--trl-python", help=f"Python that has TRL {TRL}; else .venvs/trl, made if need be")
    parser.add_argument(
        "--trl-wait-policy",
        choices=["default", "passive"],
        default="default",
        help="passive: OMP_WAIT_POLICY=PASSIVE for TRL, kinder to it on a machine that is not quiet",
    )


def trl_variables(threads: int, wait_policy: str) -> dict[str, str]:
    """Return the environment of a process of TRL's, as its users set it."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_WAIT_POLICY": "PASSIVE"} if wait_policy == "passive" else {}),
    }


def _trl_version(python: str) -> str:
    if not Path(python).exists():
        return ""
    code = "from importlib.metadata import version; print(version('trl'))"
    command = [python, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWERING_S).stdout.strip()


def _make_venv(python: str, deadline: float) -> None:
    """Install TRL beside us: the same torch and the same transformers on both sides.

    Isolated, because what a PYTHONPATH of ours offers would count as installed. An environment without an interpreter
    that runs is made anew; one that lacks packages, because an earlier call was ended, gets them.
    """
    print(f"making {VENV} with TRL {TRL} (about 1.5 GB)", flush=True)
    anew = [] if Path(python).exists() else ["--clear"]
    pip = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-I", "-m", "venv", *anew, str(VENV)],
        [*pip, f"torch=={TORCH}"],
        [*pip, f"trl=={TRL}", f"transformers=={metadata.version('transformers')}"],
    ):
        try:
            subprocess.run(command, check=True, timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise SystemExit(f"not done in time: {' '.join(command)}") from None
