"""Running one side as a process of its own: its cores, its log, its deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 30
GRACE_S = 60.0
"""A run that is asked to end finishes its step and saves."""


class RunFailed(SystemExit):
    """A command that ended with an error, or not in time: ends a script, unless failing is what it measures."""


def run_process(
    command: Sequence[str], *, log: Path, cores: int, environment: Mapping[str, str], deadline_s: float
) -> tuple[float, float]:
    """Run a command on the first `cores` cores and return when it started and ended (seconds since 1970).

    RunFailed with the log's last lines when it fails or does not end in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"  load average {os.getloadavg()[0]:.2f}; running: {' '.join(command)}", flush=True)
    ours = first_cores(cores)
    started = time.time()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=ROOT,
            preexec_fn=lambda: os.sched_setaffinity(0, ours),
        )
        try:
            code = process.wait(deadline_s)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunFailed(f"no end within {deadline_s:g} s; the log is {log}\n{tail(log)}") from None
            raise
    if code:
        raise RunFailed(f"the command ended with {code}; the log is {log}\n{tail(log)}")
    return started, time.time()


def first_cores(number: int) -> list[int]:
    """Return the first `number` cores that this process may use; SystemExit when there are fewer."""
    ours = sorted(os.sched_getaffinity(0))[:number]
    if len(ours) < number:
        raise SystemExit(f"{number} cores were asked for and this machine gives {len(ours)}; use --cores {len(ours)}")
    return ours


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])


def status(field: str) -> float:
    """Return a figure of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def new_folder(given: Path | None, name: str) -> Path:
    """Return the folder that a benchmark writes to: the given one, or one named after it and the time."""
    return (given or ROOT / "runs" / "benchmarks" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()


def areal_command(python: str = sys.executable) -> list[str]:
    """Return the command `areal` of an interpreter's environment, else of the one that this process runs in."""
    command = Path(python).parent / "areal"
    if not command.is_file():
        raise SystemExit(f"{command} does not exist; run this with the Python that areal-core is installed in")
    return [str(command)]
