"""The builtin accelerators: containers' limits as the kernel writes them, and the driver's answers."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.builtins.accelerators import cpu, cuda
from areal.builtins.accelerators.cpu import CpuAccelerator
from areal.builtins.accelerators.cuda import CudaAccelerator
from areal.errors import PluginError

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\nHugePages_Total: 0\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB, 16 of them used, and 8 cores, whose files a test can write."""
    monkeypatch.setattr(cpu, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_control_groups_the_machine_counts(root: Path) -> None:
    assert CpuAccelerator().count() == 8
    assert CpuAccelerator().memory() == (16 * GIB, 64 * GIB)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "400000", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 4),
        ({"sys/fs/cgroup/cpu.max": "9900000 100000"}, 8),
    ],
)
def test_a_containers_cores_are_its_quota(root: Path, files: dict[str, str], cores: int) -> None:
    write(root, "proc/self/cgroup", "4:cpuacct,cpu:/x\n3:memory:/x\n0::/a/b\n")
    for name, text in files.items():
        write(root, name, text + "\n")
    assert CpuAccelerator().count() == cores


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_memory_is_its_limit_without_cached_files(root: Path, version: int) -> None:
    names = {1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    key, folder = {1: ("total_inactive_file", "memory/"), 2: ("inactive_file", "")}[version]
    write(root, "proc/self/cgroup", {1: "3:memory:/gone\n0::/\n", 2: "0::/\n"}[version])
    for name, value in zip(names[version], (8 * GIB, 5 * GIB), strict=True):
        write(root, f"sys/fs/cgroup/{name}", f"{value}\n")
    write(root, f"sys/fs/cgroup/{folder}memory.stat", f"anon 7\n{key} {2 * GIB}\n")
    assert CpuAccelerator().memory() == (3 * GIB, 8 * GIB)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_an_unlimited_container_has_the_machines_memory(root: Path, limit: str) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", limit)
    write(root, "sys/fs/cgroup/memory.current", str(GIB))
    assert CpuAccelerator().memory() == (16 * GIB, 64 * GIB)


def test_without_proc_the_memory_is_refused_in_a_sentence(root: Path) -> None:
    (root / "proc/meminfo").unlink()
    with pytest.raises(PluginError, match="memory of this machine cannot be read"):
        CpuAccelerator().memory()


def test_utilisation_is_the_busy_share_between_calls(root: Path) -> None:
    accelerator = CpuAccelerator()
    write(root, "proc/stat", "cpu  100 0 50 800 50 0 0 0 7 7\ncpu0 1\n")
    accelerator.utilisation()
    write(root, "proc/stat", "cpu  160 5 60 820 55 0 0 0 9 9\ncpu0 1\n")  # 75 busy, 25 idle or waiting for a disk
    assert accelerator.utilisation() == 0.75


def test_the_first_utilisation_is_the_load(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 9.0, 9.0))
    assert CpuAccelerator().utilisation() == 0.25
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 9.0, 9.0))
    assert CpuAccelerator().utilisation() == 1.0


def test_a_busy_core_of_this_machine_is_seen() -> None:
    accelerator = CpuAccelerator()
    accelerator.utilisation()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    assert accelerator.utilisation() >= 0.2 / (os.cpu_count() or 1)


def test_memory_of_this_machine_is_near_what_the_kernel_says() -> None:
    used, total = CpuAccelerator().memory()
    assert total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < used < total


def test_threads_are_at_least_one() -> None:
    assert CpuAccelerator().environment(0, 0)["OMP_NUM_THREADS"] == "1"


def test_cuda_hides_devices_from_a_worker_that_has_none() -> None:
    assert CudaAccelerator().environment(0, 2)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in CudaAccelerator().environment(1, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_device_is_refused_in_a_sentence() -> None:
    assert not CudaAccelerator().is_available()
    for ask in (CudaAccelerator().memory, CudaAccelerator().utilisation):
        with pytest.raises(PluginError, match="torch sees no CUDA device; use device 'cpu'"):
            ask()


class FakeDriver:
    """Answers like NVML for device 5. Invariant: `open` is 0 again after every question."""

    def __init__(self) -> None:
        self.open = 0
        self.code = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 4242 if index == 5 else None
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, answer: Any) -> int:
        assert handle.value == 4242
        ctypes.memmove(ctypes.byref(answer._obj), (ctypes.c_ulonglong * 3)(80 * GIB, 60 * GIB, 20 * GIB), 24)
        return self.code

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, answer: Any) -> int:
        assert handle.value == 4242
        ctypes.memmove(ctypes.byref(answer._obj), (ctypes.c_uint * 2)(37, 99), 8)
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """One visible device, which the driver counts as its sixth; no test machine has a GPU."""
    driver = FakeDriver()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 5)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: driver)
    return driver


def test_cuda_asks_the_driver_about_the_first_visible_device(driver: FakeDriver) -> None:
    assert CudaAccelerator().is_available()
    assert CudaAccelerator().memory() == (20 * GIB, 80 * GIB)
    assert CudaAccelerator().utilisation() == 0.37
    assert driver.open == 0


def test_a_drivers_error_is_a_sentence(driver: FakeDriver) -> None:
    driver.code = 15
    with pytest.raises(PluginError, match="answered error 15 to nvmlDeviceGetMemoryInfo"):
        CudaAccelerator().memory()
    assert driver.open == 0


def test_a_missing_driver_is_a_sentence(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(CudaAccelerator, "is_available", lambda self: True)
    monkeypatch.setattr(cuda, "LIBRARY", "libabsent.so.1")
    with pytest.raises(PluginError, match=r"needs libabsent.so.1, part of NVIDIA's driver"):
        CudaAccelerator().memory()
