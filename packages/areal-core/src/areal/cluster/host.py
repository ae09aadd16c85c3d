"""The inside of a worker process: makes the component, runs its methods, gathers results for each caller.

Calls and results travel in batches, one message per turn of the event loop instead of one per call: a rollout of
a tiny model makes thousands of calls a second, and Ray's own price is about half a millisecond each. Each call's
arguments and each result are pickled on their own: one that cannot travel fails its own call and no other.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from areal import env
from areal.cluster.process import Process, this_process
from areal.cluster.stacks import answer_signals, leave_traces, stacks_of
from areal.contracts.cluster import WorkerSpec
from areal.contracts.component import import_object
from areal.contracts.engine import Ends
from areal.errors import ArealError, WorkerFailed

Call = tuple[int, str, bytes]
"""(call id, method, pickled tuple of arguments)"""
Kind = Literal["value", "item", "error"]
Result = tuple[int, Kind, bytes]
"""(call id, what it is, pickled value): ``item`` is one of a stream, the other two end the call"""

CANCEL = "__cancel__"
"""Method name by which a caller takes back the call of the same id."""


class Outbox:
    """Results for one caller. Invariant: a result leaves exactly once, in the order in which it was put."""

    def __init__(self) -> None:
        self._results: list[Result] = []
        self._filled = asyncio.Event()

    def put(self, result: Result) -> None:
        self._results.append(result)
        self._filled.set()

    async def take(self) -> list[Result]:
        await self._filled.wait()
        self._filled.clear()
        results, self._results = self._results, []
        return results


class Host:
    """A worker's process. Invariant: every accepted call puts exactly one ``value`` or ``error`` in its outbox.

    Async methods run on the event loop; sync methods run one after the other in one thread, so that the process
    goes on answering while a training step computes.
    """

    def __init__(self, spec: WorkerSpec, log_dir: str, node: str, node_id: str) -> None:
        log_file = _log_file(log_dir, spec.name)
        # Before anything is written into the log.
        self._process = this_process(node, node_id, log_file, answer_signals())
        _redirect_output(log_file)
        # Engines compile kernels with tools of their own environment, which nobody has activated.
        env.find_tools_in(str(Path(sys.executable).parent))
        env.apply(spec.environment)
        collect_rarely()
        self._spec = spec
        self._worker: Any = None
        self._outboxes: dict[str, Outbox] = defaultdict(Outbox)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.name)

    async def born(self) -> Process:
        """Return what this process can be found by, before anything heavy is imported."""
        self._loop = asyncio.get_running_loop()
        leave_traces(threading.current_thread())
        return self._process

    async def ping(self) -> bool:
        """Answer, from the event loop on which calls are answered."""
        return True

    async def stacks(self) -> str:
        """Return what this process is doing; called in a thread of its own, so that a busy event loop can be seen."""
        return stacks_of(self._loop)

    async def build(self) -> str:
        """Make the component; return what went wrong in one line, or an empty string."""
        try:
            self._worker = import_object(self._spec.factory)(*self._spec.args)
        except ArealError as error:
            return str(error)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return ""

    async def submit(self, caller: str, calls: list[Call]) -> None:
        for call_id, method, arguments in calls:
            if method == CANCEL:
                if task := self._running.get((caller, call_id)):
                    task.cancel()
                continue
            task = asyncio.create_task(self._run(caller, call_id, method, arguments))
            self._running[caller, call_id] = task

    async def collect(self, caller: str) -> list[Result]:
        """Wait for results of this caller's calls and return all that are there."""
        return await self._outboxes[caller].take()

    async def close(self) -> None:
        """Close the component if it can be closed, after whatever it is doing; what goes wrong is in the log."""
        close = getattr(self._worker, "close", None)
        try:
            if inspect.iscoroutinefunction(close):
                await close()
            elif close is not None:
                await asyncio.get_running_loop().run_in_executor(self._thread, close)
        except Exception:
            traceback.print_exc()

    async def lifeline(self) -> str:
        """Return why, once the component has ended by itself; whoever waits also learns at once that the process died.

        A component that cannot end by itself lives as long as its process.
        """
        if isinstance(self._worker, Ends):
            return await reason_of_end(self._worker)
        return await asyncio.get_running_loop().create_future()

    async def _run(self, caller: str, call_id: int, method: str, arguments: bytes) -> None:
        outbox = self._outboxes[caller]
        try:
            function, args = getattr(self._worker, method), pickle.loads(arguments)
            if inspect.isasyncgenfunction(function):
                async for item in function(*args):
                    outbox.put((call_id, "item", pickle.dumps(item)))
                value = None
            elif inspect.iscoroutinefunction(function):
                value = await function(*args)
            else:
                value = await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
            outbox.put((call_id, "value", pickle.dumps(value)))
        except BaseException as error:
            outbox.put((call_id, "error", self._pickled_error(method, error)))
        finally:
            self._running.pop((caller, call_id), None)

    def _pickled_error(self, method: str, error: BaseException) -> bytes:
        """Return an ArealError as it is and anything else as one sentence; its traceback goes to this worker's log."""
        if isinstance(error, ArealError):
            with suppress(Exception):  # a plugin's own class may not survive the journey
                travelled = pickle.dumps(error)
                pickle.loads(travelled)
                return travelled
        if not isinstance(error, asyncio.CancelledError):
            traceback.print_exception(error)
        return pickle.dumps(WorkerFailed(f"{self._spec.name} failed in {method!r}: {type(error).__name__}: {error}"))


async def reason_of_end(worker: Ends) -> str:
    """Wait until a component has ended by itself and return why; one that fails to watch itself has ended too."""
    try:
        return await worker.ended()
    except Exception as error:
        traceback.print_exc()
        return f"it failed in 'ended': {type(error).__name__}: {error}"


def collect_rarely() -> None:
    """Let Python look for garbage cycles less often: thousands of live messages are traversed at each look."""
    gc.set_threshold(20_000, 20, 20)


def _log_file(log_dir: str, name: str) -> str:
    """Return where this worker's output goes: the run's own folder, or on a machine that does not have it another."""
    folder = Path(log_dir)
    if not folder.is_dir():
        folder = Path(tempfile.mkdtemp(prefix="areal-logs-"))
    file = folder / f"{name}.log"
    file.touch()
    return str(file)


def _redirect_output(log_file: str) -> None:
    """Send stdout and stderr, and those of libraries written in C, to the worker's own log file."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
