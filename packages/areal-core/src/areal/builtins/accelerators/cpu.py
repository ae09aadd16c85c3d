"""The accelerator `cpu`: the cores and the memory that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from areal.contracts.options import Options
from areal.errors import PluginError

ROOT = Path("/")


def thread_environment(threads: int) -> dict[str, str]:
    """Return variables that give a process its share of cores and keep waiting threads from burning it.

    Waiting OpenMP threads spin by default; with more processes than cores each spins the others' time away.
    """
    count = str(max(1, threads))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMEXPR_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


class CpuAccelerator:
    """Invariant: what the operating system or a container keeps from this process is not counted."""

    name = "cpu"
    collective = "gloo"
    resource = ""

    def __init__(self, options: Options | None = None) -> None:
        self._before: tuple[float, float] | None = None

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        """Usable cores: the affinity mask, cut to the control group's quota, at least one."""
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        quotas = [quota for folder in _control_groups("cpu") if (quota := _quota_cores(folder)) is not None]
        return max(1, min([cores, *map(int, quotas)]))

    def environment(self, devices: int, threads: int) -> Mapping[str, str]:
        return thread_environment(threads)

    def memory(self) -> tuple[int, int]:
        """Return (used, total) bytes of the machine, or of the control group when that has less."""
        try:
            lines = (ROOT / "proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise PluginError(f"the memory of this machine cannot be read: {error}; /proc/meminfo is needed") from error
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        total, used = kib["MemTotal"] * 1024, (kib["MemTotal"] - kib["MemAvailable"]) * 1024
        for folder in _control_groups("memory"):
            limit, taken = _memory_group(folder)
            if 0 < limit < total:
                total, used = limit, taken
        return used, total

    def utilisation(self) -> float:
        """Return the busy share of all cores since the last call; the first call gives the minute's load."""
        now = _cpu_times()
        before, self._before = self._before, now
        if now is None or before is None or now[1] <= before[1]:
            return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        return min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1])))


def _cpu_times() -> tuple[float, float] | None:
    """Return (busy, all) ticks of all cores since boot; None where there is no /proc."""
    try:
        fields = (ROOT / "proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    except OSError:
        return None
    ticks = [float(field) for field in fields]  # user nice system idle iowait irq softirq steal
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group for `controller` and of its parents, innermost first."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "":  # version 2: one tree for all controllers
            top = ROOT / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = ROOT / "sys/fs/cgroup" / controller
        else:
            continue
        folder = top / inner.lstrip("/")
        folders += [path for path in (folder, *folder.parents) if path == top or top in path.parents]
    return folders


def _quota_cores(folder: Path) -> float | None:
    """Return the cores that a group may use; None without a limit. Both versions give microseconds per period."""
    words = _read(folder / "cpu.max").split()
    words = words or [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    try:
        quota, period = map(int, words)
    except ValueError:  # the word max, or no such files
        return None
    return quota / period if quota > 0 else None


def _memory_group(folder: Path) -> tuple[int, int]:
    """Return (limit, used) bytes of a group, (0, 0) without a limit; cached files can be dropped and do not count."""
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    statistics = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    cached = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
    if not (limit.isdigit() and used.isdigit()):
        return 0, 0
    return int(limit), max(0, int(used) - int(cached))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
