"""Scoring in a process that can be killed: a scorer that hangs, crashes or eats memory costs one outcome, not the run.

episode ──► Scorer ──(one JSON line over a socket)──► child: function(**arguments)
               └── past the deadline: kill the child's process group, start another at the next call
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from areal.contracts.component import import_object
from areal.contracts.messages import Outcome
from areal.errors import PluginError

# Importing sympy or reasoning-gym takes seconds on a busy machine; beyond this the child is considered lost.
START_TIMEOUT_S = 120.0
# A child whose parent was killed in the middle of a call ends itself this long after the call's deadline.
ORPHAN_GRACE_S = 10.0


class Scorer:
    """Calls one function in a child process, one call at a time.

    Invariant: every call ends with an outcome by its deadline: ok only if the function returned a finite reward,
    ``timeout`` if the child had to be killed, ``error`` if the function raised or the child died.
    """

    def __init__(self, function: str, timeout_s: float) -> None:
        """`function`: ``"package.module:name"``; takes JSON values, returns ``{"reward": r, metric: x, ...}``.

        `timeout_s`: seconds for one call; waiting for earlier calls and starting the child do not count.
        """
        self._function = function
        self._timeout_s = timeout_s
        # One thread: calls queue here, and none of the event loop's own threads is ever blocked.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")
        self._child: _Child | None = None

    async def score(self, **arguments: Any) -> Outcome:
        """Call the function with `arguments`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, arguments)

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.process.pid if self._child else None

    def _score(self, arguments: dict[str, Any]) -> Outcome:
        try:
            self._child = self._child or _Child(self._function, self._timeout_s)
            reply = self._child.call(arguments, self._timeout_s)
        except TimeoutError as expired:
            self._kill_child()
            return Outcome.timeout(str(expired))
        except (EOFError, OSError, ValueError) as broken:
            return Outcome.error(f"the scoring process of {self._function} died: {self._kill_child() or broken}")
        return Outcome.error(reply["error"]) if "error" in reply else Outcome.scored(**reply)

    def _kill_child(self) -> str:
        child, self._child = self._child, None
        return child.kill() if child else ""


class _Child:
    """Invariant: leads a process group of its own, so that killing it also kills whatever it started."""

    def __init__(self, function: str, timeout_s: float) -> None:
        """Start the child and wait until it has imported its function; raises what `call` raises."""
        self._function = function
        self._connection, theirs = Pipe()
        folder = tempfile.mkdtemp(prefix="areal-scorer-")
        program = f"from {__name__} import serve; serve({theirs.fileno()}, {function!r}, {timeout_s!r}, {folder!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self.process, folder)
        if refusal := self._receive(START_TIMEOUT_S, "start"):
            raise EOFError(refusal["error"])

    def call(self, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError, or EOFError, OSError or ValueError when the child is broken."""
        self._connection.send_bytes(json.dumps(arguments).encode())
        return self._receive(timeout_s, "answer")

    def kill(self) -> str:
        """End the child and return how it ended."""
        self._end()
        self._connection.close()
        return f"exit code {self.process.returncode}"

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"the scoring process of {self._function} did not {what} within {timeout_s:g} s")
        # JSON, not pickle: whatever runs in the child must not be able to run code here.
        return json.loads(self._connection.recv_bytes())


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def serve(descriptor: int, function: str, timeout_s: float, folder: str) -> None:
    """Run in the child: answer calls until the parent closes its end; temporary files go to `folder`."""
    tempfile.tempdir = folder
    connection = Connection(descriptor)
    try:
        score: Callable[..., dict[str, float]] = import_object(function)
    except PluginError as refusal:
        connection.send_bytes(json.dumps({"error": str(refusal)}).encode())
        return
    connection.send_bytes(b"{}")
    with contextlib.suppress(EOFError):
        while True:
            arguments = json.loads(connection.recv_bytes())
            faulthandler.dump_traceback_later(timeout_s + ORPHAN_GRACE_S, exit=True)
            connection.send_bytes(json.dumps(_answer(score, arguments)).encode())
            faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed cannot


def _answer(score: Callable[..., dict[str, float]], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return score(**arguments)
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
