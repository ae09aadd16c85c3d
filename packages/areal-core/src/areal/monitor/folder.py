"""A run's folder: what stands where, and how to find it again."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from areal.errors import ConfigError, JournalError, did_you_mean

_log = logging.getLogger(__name__)


class RunFolder:
    """Invariant: everything a run writes lies below `path`, and `config.yaml` is there before anything else.

    config.yaml  lock  control  journal.sqlite  metrics.jsonl  tensorboard/  logs/  checkpoints/  weights/  reward.png
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs_dir: str, name: str, config: str) -> RunFolder:
        """Make a new folder ``NAME-DATE-TIME`` and write the resolved recipe; ConfigError when that fails."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        try:
            path = _new_folder(Path(runs_dir), f"{name}-{stamp}")
            (path / "config.yaml").write_text(config, encoding="utf-8")
            (path / "logs").mkdir()
        except OSError as error:
            raise ConfigError(
                f"the run's folder could not be made in runs_dir {runs_dir!r}: {error.strerror}; "
                "give another one with runs_dir=FOLDER"
            ) from error
        return cls(path.resolve())

    @classmethod
    def find(cls, run: str, runs_dir: str) -> RunFolder:
        """Return the folder of a run given as a path, as a name in `runs_dir`, or as ``latest``."""
        folders = sorted(Path(runs_dir).glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
        if run == "latest" and folders:
            return cls(folders[-1].parent.resolve())
        for candidate in (Path(run), Path(runs_dir) / run):
            if (candidate / "config.yaml").is_file():
                return cls(candidate.resolve())
        names = [file.parent.name for file in folders]
        there = f"it has {', '.join(names[-5:])}" if names else "it has no runs"
        raise JournalError(f"no run {run!r} here or in {runs_dir!r}; {there}{did_you_mean(run, names)}")

    def lock(self) -> None:
        """Keep other controllers out until this process ends; JournalError when one is at work already."""
        # Held by the open file: the kernel lets go however the process ends.
        try:
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise JournalError(f"the run's folder {self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._lock, 32).decode(errors="replace") or "unknown"
            os.close(self._lock)
            raise JournalError(
                f"run {self.path.name} is still going on in process {owner}; wait for its end or stop it with Ctrl-C"
            ) from error
        except OSError as error:  # some network file systems have no locks
            _log.warning("%s cannot be locked (%s); take care to run it once at a time", self.path, error.strerror)
        try:
            os.ftruncate(self._lock, 0)
            os.write(self._lock, str(os.getpid()).encode())
        except OSError as error:
            os.close(self._lock)
            raise JournalError(
                f"the run's folder {self.path} cannot be written: {error.strerror}; see that its disk has room, and go "
                f"on with: areal resume {self.path}"
            ) from error

    def owner(self) -> str:
        """Return the process of the controller that is at work on this run; empty when there is none."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return (self.path / "lock").read_text(errors="replace") or "unknown"
        except OSError:  # no lock yet, or a file system without locks
            return ""
        return ""

    def unlock(self) -> None:
        """Let other controllers in."""
        os.close(self._lock)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def control(self) -> Path:
        """Says where the controller answers, while there is one."""
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the bundled model is written when the recipe names none."""
        return self.path / "model"


def _new_folder(parent: Path, name: str) -> Path:
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        path = parent / f"{name}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"{parent} has 99 runs named {name!r}; give this one another name with name=NAME")
