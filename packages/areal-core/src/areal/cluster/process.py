"""A worker's process as others on its machine see it: whether it lives, what it is doing, how it ended.

Only what the kernel says; everything here works while the process itself is frozen, stuck or gone.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal.cluster.reasons import LINES_THAT_TELL

LOG_TAIL_LINES = 30
LINES_SEARCHED = 300
"""Stacks of a crash may be longer than what is shown."""
_PROC = Path("/proc")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped",
}
_POLL_S = 0.01
_QUIET_S = 0.2
"""Stacks that have not grown for so long are complete."""
_OPEN_FILES_OF = "fd"

# From linux/pidfd.h: struct pidfd_info of 64 bytes; Linux 6.15 and later keep a process's status for its pidfds.
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A worker's process. Invariant: `machine`, `pid` and `started` together name one process and no later one."""

    pid: int
    started: int
    """Clock ticks from the machine's start to the process's; 0 where there is no /proc."""
    machine: str
    """Identity of the machine, as far as process ids go."""
    node: str
    """Name or address of the machine."""
    node_id: str
    """What the cluster calls it."""
    log_file: str
    """On its machine; of a resumed run's worker it begins with what its namesake wrote before."""
    log_start: int
    """Bytes of the log that were there before."""
    stacks_descriptor: int
    """Of the file into which its stacks go on SIGUSR1; -1: none."""
    oom_kills: int
    """Processes that the machine's kernel had killed for memory when this one started."""

    @property
    def is_here(self) -> bool:
        """Whether process ids of this process's machine mean the same in ours."""
        return self.machine == machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What a machine knows of a process that ended. Invariant: read after the end."""

    tail: str
    """The last lines of its log."""
    words: tuple[str, ...]
    """Those of the log's last lines that begin with one of LINES_THAT_TELL."""
    oom_kills: int


def this_process(node: str, node_id: str, log_file: str, stacks_descriptor: int) -> Process:
    return Process(
        pid=os.getpid(),
        started=_started(os.getpid()),
        machine=machine(),
        node=node,
        node_id=node_id,
        log_file=log_file,
        log_start=Path(log_file).stat().st_size if log_file else 0,
        stacks_descriptor=stacks_descriptor,
        oom_kills=oom_kills(),
    )


def machine() -> str:
    """Return the identity of what process ids here refer to: this start of the kernel, this namespace."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return os.uname().nodename


def state(process: Process) -> str:
    """Return ``running``, ``sleeping``, ``stopped (SIGSTOP)``, ...; empty when the process is gone."""
    fields = _stat(process.pid)
    if not fields or (process.started and int(fields[19]) != process.started):
        return ""
    return _STATES.get(fields[0], f"in state {fields[0]}")


def end(process: Process, patience_s: float, deadline_s: float) -> bool:
    """Kill a process of this machine that is not gone by itself in a moment; return whether it is gone in time."""
    began = time.monotonic()
    while state(process) not in ("", _STATES["Z"]):
        waited_s = time.monotonic() - began
        if waited_s > deadline_s:
            return False
        if waited_s > patience_s or state(process) == _STATES["T"]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return True


def look(process: Process, deadline_s: float) -> str:
    """Return what a process of this machine is doing, for one that does not answer itself."""
    seen = state(process)
    if seen in ("", _STATES["Z"]):
        return f"process {process.pid} on {process.node} is gone"
    sentence = f"process {process.pid} on {process.node} does not answer and is {seen}"
    stacks = "" if seen == _STATES["T"] else _stacks(process, deadline_s)
    return f"{sentence}; its threads:\n{stacks}" if stacks else sentence


def remains(process: Process) -> Remains:
    lines = tail(process, LINES_SEARCHED).splitlines()
    return Remains(
        tail="\n".join(lines[-LOG_TAIL_LINES:]),
        words=tuple(line for line in lines if line.startswith(LINES_THAT_TELL)),
        oom_kills=oom_kills(),
    )


def tail(process: Process, num_lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines that a process wrote into its log; empty when the log is not here."""
    try:
        with Path(process.log_file).open("rb") as log:
            log.seek(process.log_start)
            return b"".join(deque(log, maxlen=num_lines)).decode(errors="replace").rstrip()
    except OSError:
        return ""


def oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for memory, in all or in our cgroup."""
    return max(_counter(_PROC / "vmstat"), _counter(_own_cgroup() / "memory.events"))


class Ending:
    """Knows the status with which a process of this machine ends. Invariant: waits for nothing.

    A process that is not our child cannot be waited for; a pidfd that was open before it ended still says how, on
    Linux 6.15 and later.
    """

    def __init__(self, process: Process) -> None:
        self._descriptor = -1
        if process.is_here and hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._descriptor = os.pidfd_open(process.pid)

    @property
    def status(self) -> int | None:
        """The exit code, or minus the signal; None while the process lives, and where nobody knows."""
        if self._descriptor < 0:
            return None
        import fcntl  # there is none on Windows

        info = bytearray(64)
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        if not struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return None
        return os.waitstatus_to_exitcode(struct.unpack_from("i", info, 60)[0])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or none."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _stacks(process: Process, deadline_s: float) -> str:
    """Have the stacks written that C code may be holding back, and return them."""
    if process.stacks_descriptor < 0:
        return ""
    file = _PROC / str(process.pid) / _OPEN_FILES_OF / str(process.stacks_descriptor)
    give_up = time.monotonic() + deadline_s
    try:
        before = file.stat().st_size
        os.kill(process.pid, signal.SIGUSR1)
        size, since = before, time.monotonic()
        while time.monotonic() < give_up and (size == before or time.monotonic() < since + _QUIET_S):
            time.sleep(_POLL_S)
            if (grown := file.stat().st_size) != size:
                size, since = grown, time.monotonic()
        return file.read_bytes()[before:].decode(errors="replace").rstrip()
    except OSError:
        return ""


def _own_cgroup() -> Path:
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    return Path("/sys/fs/cgroup") / own.lstrip("/")


def _counter(file: Path) -> int:
    try:
        lines: Iterable[str] = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
