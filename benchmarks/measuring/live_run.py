"""A run whose processes can be found, looked at and ended while it goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from measuring.processes import ROOT, areal_command
from measuring.written_run import WrittenRun

SCORER = "areal.builtins.tasks.scoring"
"""Stands in the command line of every scoring process."""
LEFT_BEHIND_S = 30.0
"""For the kernel and Ray to take down what belonged to a process that was killed."""
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENTS_LEFT_BEHIND_S = 120.0
"""These two look for a dead head for 60 s before they end (Ray 2.60)."""


class LiveRun(WrittenRun):
    """`areal run`, and `areal resume` after its end, in one folder. Invariant: there is one controller at most."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder)
        self._arguments = arguments
        self._controller: psutil.Popen | None = None
        self.log = folder / "log"
        self.num_resumes = 0

    def start(self) -> None:
        self._launch("run", *self._arguments, f"runs_dir={self._folder / 'runs'}")

    def resume(self, max_steps: int | None = None) -> None:
        """Go on; `max_steps`: with another end than the recipe's."""
        if max_steps is not None:
            config = self.path / "config.yaml"
            text, changed = re.subn(r"(?m)^( +max_steps: )\d+$", rf"\g<1>{max_steps}", config.read_text("utf-8"))
            if changed != 1:
                raise SystemExit(f"{config} does not say training.max_steps once")
            config.write_text(text, "utf-8")
        self.num_resumes += 1
        self._launch("resume", str(self.path))

    def workers_command(self, *arguments: str, deadline_s: float) -> str:
        """Return what `areal workers add|remove|list` says; whatever goes wrong is in it, too."""
        verb, *rest = arguments
        command = [*areal_command(), "workers", verb, str(self.path), *rest]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s, check=False)
            return f"{done.stdout}{done.stderr}"
        return f"no answer within {deadline_s:g} s"

    def _launch(self, *arguments: str) -> None:
        # Ray gives its workers the niceness 15: beside anybody else on the machine they would only wait.
        paths = {"PYTHONPATH": str(ROOT / "benchmarks"), "COLUMNS": "200", "RAY_worker_niceness": "0"}
        with self.log.open("a", encoding="utf-8") as output:
            self._controller = psutil.Popen(
                [*areal_command(), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **paths},
                cwd=ROOT,
                start_new_session=True,
            )

    # what there is

    @property
    def code(self) -> int | None:
        """Exit code of the controller, minus the signal; None while it lives."""
        return self._controller.poll() if self._controller else None

    @property
    def controller(self) -> psutil.Process:
        if self._controller is None:
            raise SystemExit("the run has not been started")
        return psutil.Process(self._controller.pid)

    def wait(self, deadline_s: float) -> int | None:
        """Return the controller's exit code, or None when it lives on."""
        assert self._controller is not None
        with suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
            return self._controller.wait(deadline_s)
        return None

    def workers(self) -> dict[str, psutil.Process]:
        """Return the processes that write a worker's log, by the worker's name."""
        logs = self.path / "logs"
        found: dict[str, psutil.Process] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, psutil.NoSuchProcess):
                    target = (entry / "fd" / "1").readlink()
                    if target.parent == logs and target.suffix == ".log":
                        found[target.stem] = psutil.Process(int(entry.name))
        return found

    def scorers(self) -> list[psutil.Process]:
        """Return the scoring processes of the rollout workers."""
        return [
            child
            for name, worker in self.workers().items()
            if name.startswith("rollout")
            for child in _children(worker)
            if any(SCORER in word for word in _command_line(child))
        ]

    def nodes(self) -> list[psutil.Process]:
        """Return the process that is Ray's node."""
        return [child for child in _children(self.controller) if _name(child) == "raylet"]

    def ray_processes(self) -> list[tuple[str, psutil.Process]]:
        """Return what Ray itself runs for this controller, by name: not the workers, nor what they started."""
        others = [*self.workers().values(), *self.scorers()]
        there = [(_title(child), child) for child in _children(self.controller) if child not in others]
        return [(name, process) for name, process in there if name]

    def everybody(self) -> dict[int, psutil.Process]:
        """Return all processes that this run has now, Ray's included."""
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            there = [self.controller, *_children(self.controller), *self.workers().values(), *self.scorers()]
            return {process.pid: process for process in there}
        return {}

    # the end

    def left_behind(self, known: Mapping[int, psutil.Process], *, agents: bool = False) -> list[str]:
        """End what is left of a run whose controller is gone, and return what it was; `agents`: Ray's agents, too."""
        give_up = time.monotonic() + (AGENTS_LEFT_BEHIND_S if agents else LEFT_BEHIND_S)
        alive = list(known.values())
        while alive and time.monotonic() < give_up:
            # Asked each time: a process gives itself its title some time after its start.
            alive = [process for process in alive if _lives(process) and (agents or not _is_agent(process))]
            time.sleep(0.2 if alive else 0.0)
        described = [f"{process.pid} {' '.join(_command_line(process))[:80] or _name(process)}" for process in alive]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return described

    def end(self) -> None:
        """Kill whatever of it is there."""
        known = self.everybody()
        for process in known.values():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if self._controller is not None:
            self.wait(10.0)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _is_agent(process: psutil.Process) -> bool:
    # Not the name: psutil remembers the one that a process had before it gave itself a title.
    return "".join(_command_line(process)[:1]).strip() in RAYS_AGENTS


def _title(process: psutil.Process) -> str:
    """Return what a process of Ray is: its program, its script, or the title that it gave itself."""
    words = _command_line(process)
    scripts = [Path(word).stem for word in words[1:] if word.endswith(".py")]
    titled = "".join(words[:1]).strip()
    return scripts[0] if scripts else titled if titled.startswith("ray::") else _name(process)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
