"""A process that lives over many rounds and is asked one thing at a time: one end of a pipe each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measuring.processes import ROOT, RunFailed, first_cores, tail

START_S = 600.0
"""Time for importing vLLM and loading a model."""
ENDING_S = 60.0


class Peer:
    """A module of ours in a process and a Python of its own. Invariant: it has one question at a time to answer.

    The module's process calls `parent`, and answers each question with one message.
    """

    def __init__(
        self,
        python: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        log: Path,
        cores: int,
        environment: Mapping[str, str],
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, chosen = first_cores(cores), {"PYTHONPATH": str(ROOT / "benchmarks"), **environment}
        self._log = log
        self._connection, theirs = Pipe()
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, str(theirs.fileno()), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **chosen},
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                preexec_fn=lambda: os.sched_setaffinity(0, ours),
            )
        theirs.close()

    def ask(self, *question: Any, deadline_s: float = START_S) -> Any:
        """Return the answer to a question; RunFailed with the log's last lines when none comes in time."""
        self.tell(*question)
        return self.hear(deadline_s)

    def tell(self, *question: Any) -> None:
        try:
            self._connection.send(question)
        except OSError:
            raise self._failed("ended") from None

    def hear(self, deadline_s: float = START_S) -> Any:
        try:
            if self._connection.poll(deadline_s):
                return self._connection.recv()
        except (EOFError, OSError):
            raise self._failed("ended without an answer") from None
        raise self._failed(f"gave no answer within {deadline_s:g} s")

    def close(self) -> None:
        """Hang up, which is how the process knows that it may end."""
        self._connection.close()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, what: str) -> RunFailed:
        time.sleep(0.5)  # its last words are on their way to the log
        return RunFailed(f"the process {what}; the log is {self._log}\n{tail(self._log)}")


def parent() -> tuple[Connection, list[str]]:
    """Return, in a peer's process, the connection that questions come by, and the peer's arguments.

    ``recv`` raises EOFError when no more will come.
    """
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # a process that this one starts must not keep the pipe open
    return Connection(handle), sys.argv[2:]
