"""Why a worker died, in one sentence, from what the kernel, Ray and its own log say; never more than they say."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

EXIT_LINE = "areal: this process exits with code "
"""Written into the log by a worker that leaves without an exception."""
FATAL_LINE = "Fatal Python error: "
STACK_LINE = "Stack (most recent call first):"
"""Begins the stack that a worker writes when it gets SIGTERM, and with FATAL_LINE above it when it crashes."""
LINES_THAT_TELL = (EXIT_LINE, FATAL_LINE, STACK_LINE)
_FATAL: Mapping[str, signal.Signals] = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""How faulthandler names the signals that it reports."""
ENDED_BY_US = "it was ended by the controller"


def said_by_ray(error: Exception, node: str = "") -> str:
    """Return what Ray knows of the cause: the memory monitor, the node, our own kill; empty when it knows none."""
    text, where = " ".join(str(error).split()), f"its node {node}".rstrip()
    if "NODE_OUT_OF_MEMORY" in text or "OutOfMemory" in type(error).__name__ or "running low on memory" in text:
        found = re.search(r"Memory on the node .*? was ([^;,]*?)(?:, which|;|\.\s)", text)
        used = f" ({found[1]} in use)" if found else ""
        return (
            f"out of memory: Ray's memory monitor killed it because its node{' ' + node if node else ''} ran low{used}"
        )
    if "its node has died" in text or "node was terminated" in text:
        found = re.search(r"(?:the actor's node was terminated (?:un)?expectedly|expectedly): (.*?)\.?$", text)
        return f"{where} died" + (f": {found[1]}" if found else "")
    if "killed by `ray.kill`" in text:
        return ENDED_BY_US
    return ""


def root_cause(status: int | None, words: Sequence[str], oom_kills: tuple[int, int]) -> str:
    """Return how a process ended.

    `status`: exit code, or minus the signal; None when nobody knows. `words`: those of its log's last lines that begin
    with one of LINES_THAT_TELL. `oom_kills`: processes that its machine's kernel had killed for memory, when it
    started and after it ended.
    """
    before, after = oom_kills
    if status is not None and status >= 0:
        return f"it exited with code {status}"
    if status is not None and -status != signal.SIGKILL:
        return f"it was ended by {_name(-status)}"
    if status is None and words:
        return _told_by_log(words)
    if after > before:
        return f"out of memory: the kernel killed it (such kills on its machine while it ran: {after - before})"
    doubt = "" if status is not None else ", as far as anybody can know"
    return f"killed from outside (SIGKILL){doubt}: nothing in its log, no out-of-memory event on its machine"


def with_tail(reason: str, tail: str) -> str:
    """Return the reason with the log's last lines behind it, if there are any."""
    return f"{reason}; its log ends with:\n{tail}" if tail else reason


def _told_by_log(words: Sequence[str]) -> str:
    """Return what the last of these lines stands for."""
    if words[-1].startswith(EXIT_LINE):
        return f"it exited with code {words[-1].removeprefix(EXIT_LINE)}"
    fatal = [line.removeprefix(FATAL_LINE) for line in words if line.startswith(FATAL_LINE)]
    if not fatal:
        return "it was ended by SIGTERM"
    return f"it was ended by {_FATAL[fatal[-1]].name}" if fatal[-1] in _FATAL else f"it failed: {fatal[-1]}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
