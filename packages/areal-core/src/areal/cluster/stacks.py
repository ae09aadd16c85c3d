"""What a worker tells of itself: what it is doing, and a line in its log when it ends without an exception."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

from areal.cluster.reasons import EXIT_LINE

TASKS_SHOWN = 50
"""A rollout worker has thousands, nearly all in the same place."""

_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")


def stacks_of(loop: asyncio.AbstractEventLoop) -> str:
    """Return the stacks of all threads, and of the tasks of `loop`; may be called from any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    ]
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    parts += [_task(task) for task in tasks[:TASKS_SHOWN]]
    if len(tasks) > TASKS_SHOWN:
        parts.append(f"and {len(tasks) - TASKS_SHOWN} more tasks\n")
    return "\n".join(parts).rstrip()


def answer_signals() -> int:
    """Write stacks on SIGUSR1, also while C code holds the interpreter; return the descriptor they go to, or -1.

    The file has no name: whoever may look into this process reads it by the descriptor.
    """
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("areal-stacks")
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    return descriptor


def _task(task: asyncio.Task[object]) -> str:
    lines: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:  # the task's own `get_stack` knows the outermost coroutine only
        frame = next((found for name in _FRAMES if (found := getattr(awaited, name, None)) is not None), None)
        if frame is not None:
            lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
        awaited = next((found for name in _AWAITED if (found := getattr(awaited, name, None)) is not None), None)
    return f"{task.get_name()}:\n" + "".join(lines)


def leave_traces(loop_thread: threading.Thread) -> None:
    """Have crashes, SIGTERM and exits noted in the log, which nobody but the kernel would know of otherwise.

    `loop_thread` runs the event loop: when sys.exit ends it, no call is answered any more, so the process ends too.
    """
    faulthandler.enable(file=2, all_threads=False)
    # Ray's own handler waits for the main thread, which never runs Python again; the default ends the process.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).signal(signal.SIGTERM, None)
        faulthandler.register(signal.SIGTERM, file=2, all_threads=False, chain=True)
    own, exit_now, excepthook = os.getpid(), os._exit, threading.excepthook

    def note_and_exit(status: int) -> NoReturn:
        if os.getpid() == own:  # forked children leave this way, too
            with suppress(OSError):
                os.write(2, f"{EXIT_LINE}{status}\n".encode())
        exit_now(status)

    def end_with_loop(args: threading.ExceptHookArgs) -> None:
        if args.thread is loop_thread and isinstance(args.exc_value, SystemExit):
            code = args.exc_value.code
            note_and_exit(code if isinstance(code, int) else int(code is not None))
        excepthook(args)

    os._exit = note_and_exit
    threading.excepthook = end_with_loop
