"""What this machine has for a run, what each missing piece costs, and the command that brings it."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from areal import env
from areal.contracts.finding import Finding, State
from areal.monitor.probe import ask_plugin, run_probe
from areal.plugins import PluginRow, Plugins, discover

CORE = "areal-core"
LOWEST_PYTHON = (3, 11)
GIB = 2**30
# Controller, trainer, engine and rollout worker each import torch or transformers, at 0.3 to 0.5 GiB a process.
ENOUGH_MEMORY_BYTES = 3 * GIB
ENOUGH_DISK_BYTES = 2 * GIB
# Containers get 64 MiB unless told otherwise; object store and shared weights live there.
ENOUGH_SHARED_BYTES = GIB // 4

EXTRAS = {
    "tasks": "no scoring of gsm8k answers, no reasoning_gym tasks, no hub datasets",
    "code": "no environment humaneval",
    "smollm2": "no 'areal models pull smollm2'",
    "wandb": "no tracker wandb",
    "test": "no conformance kit, and no 'areal conformance'",
}
"""What a run cannot have without each of core's extras."""
COMPANIONS = {
    "areal-vllm": ("no engine vllm", "pip install 'areal-vllm[vllm]'", "pip install 'areal-vllm[cpu]'"),
    "areal-sglang": ("no engine sglang: its plugin is not published yet", "", ""),
}
"""AReaL's own plugins: what a run cannot have without each, and what brings it with an accelerator and without."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Invariant: `can_run` is true exactly when nothing required is absent or broken."""

    findings: tuple[Finding, ...]

    @property
    def can_run(self) -> bool:
        return not any(finding.is_required and finding.state in ("absent", "broken") for finding in self.findings)


def diagnose(block: Iterable[str] = (), folder: str | Path = ".") -> Diagnosis:
    """Look at everything a run in `folder` needs; PluginError only when `block` names no plugin."""
    block = tuple(block)
    plugins = discover(block)
    found = run_probe(block)
    return Diagnosis(
        (
            _python(),
            *_libraries(),
            *_torch_and_devices(found),
            *_machine(Path(folder)),
            *_plugins(plugins),
            *_told(plugins, block),
            *_extras(),
            *_companions(plugins, found),
        )
    )


def _python() -> Finding:
    is_enough = sys.version_info >= LOWEST_PYTHON
    wanted = ".".join(map(str, LOWEST_PYTHON))
    return Finding(
        topic="software",
        name="python",
        state="ok" if is_enough else "broken",
        detail=f"{platform.python_version()} at {sys.executable}" + ("" if is_enough else f"; {wanted} is the lowest"),
        is_required=True,
    )


def _libraries() -> Iterator[Finding]:
    """Yield one finding per hard dependency of core, torch apart: it has a probe of its own."""
    needed = _requirements().get("")
    if needed is None:
        detail = "not installed as a distribution, so nothing builtin is found"
        command = "pip install ./packages/areal-core"
        yield Finding(topic="software", name=CORE, state="absent", detail=detail, command=command, is_required=True)
    for name in sorted(set(needed or ()) - {"torch"}):
        version = _version(name)
        yield Finding(
            topic="software",
            name=name,
            state="ok" if version else "absent",
            detail=version or "not installed, and core needs it",
            command="" if version else f"pip install {CORE}",
            is_required=True,
        )


def _torch_and_devices(found: Mapping[str, Any]) -> Iterator[Finding]:
    torch = found.get("torch", {})
    failure = found.get("failure") or torch.get("failure")
    if not _version("torch") and failure:
        state, detail = "absent", "not installed: nothing can be trained or generated"
    elif failure:
        state, detail = "broken", f"{failure}; nothing can be trained or generated"
    else:
        state, detail = "ok", f"{torch['version']}, {torch['threads']} threads unless told otherwise"
    command = {"absent": "pip install torch", "broken": "pip install --force-reinstall torch"}.get(state, "")
    yield Finding(topic="software", name="torch", state=state, detail=detail, command=command, is_required=True)
    devices: Mapping[str, Any] = found.get("devices", {})
    for name, device in devices.items():
        yield _device(name, device)
    if not any(device.get("count") for device in devices.values()):
        detail = "no accelerator answers, not even the CPU; models have nowhere to run"
        yield Finding(topic="devices", name="any", state="absent", detail=detail, is_required=True)


def _device(name: str, device: Mapping[str, Any]) -> Finding:
    if failure := device.get("failure"):
        return Finding(topic="devices", name=name, state="broken", detail=f"cannot be used: {failure}")
    if not device["count"]:
        return Finding(topic="devices", name=name, state="absent", detail="none on this machine")
    count, memory = device["count"], f"{device['total_bytes'] / GIB:.1f} GiB"
    if name != "cpu":
        return Finding(topic="devices", name=name, state="ok", detail=f"{count} with {memory} each")
    costs = []
    if count < 2:
        costs.append("trainer and engine share one core, so neither runs while the other does")
    if device["total_bytes"] < ENOUGH_MEMORY_BYTES:
        costs.append("workers may be killed for memory")
    detail = "; ".join([f"{count} cores, {memory}", *costs])
    return Finding(topic="devices", name=name, state="low" if costs else "ok", detail=detail)


def _machine(folder: Path) -> Iterator[Finding]:
    disks = {
        "disk": (folder, ENOUGH_DISK_BYTES, "checkpoints may not fit"),
        "cache disk": (Path(env.cache_dir()), ENOUGH_DISK_BYTES, "converted models may not fit"),
        "/dev/shm": (Path("/dev/shm"), ENOUGH_SHARED_BYTES, "weights and ray's objects go through files instead"),
    }
    for name, (path, enough, cost) in disks.items():
        # The cache is made when it is first used: until then its nearest existing parent tells.
        if place := next((place for place in (path.resolve(), *path.resolve().parents) if place.exists()), None):
            yield _room(name, shutil.disk_usage(place).free, enough, cost)


def _room(name: str, num_bytes: int, enough: int, cost: str) -> Finding:
    detail = f"{num_bytes / GIB:.1f} GiB free"
    if is_low := num_bytes < enough:
        detail += f", less than {enough / GIB:g}: {cost}"
    return Finding(topic="machine", name=name, state="low" if is_low else "ok", detail=detail)


def _plugins(plugins: Plugins) -> Iterator[Finding]:
    for row in plugins.rows():
        yield _plugin(row)
        if row.state == "loaded" and row.distribution != CORE:
            for offer in row.offers:
                if obstacle := plugins.obstacle(offer):
                    name = f"{offer.kind} {offer.component.name}"
                    command = offer.component.install if offer.component.missing() else ""
                    yield Finding(topic="plugins", name=name, state="absent", detail=obstacle, command=command)
    if not any(row.distribution == CORE for row in plugins.rows()):
        detail = "the builtin plugin was not found, so there is no engine, no backend and no task"
        yield Finding(topic="plugins", name="builtin", state="absent", detail=detail, is_required=True)


def _plugin(row: PluginRow) -> Finding:
    state: State = {"loaded": "ok", "blocked": "absent", "broken": "broken"}[row.state]  # type: ignore[assignment]
    detail = row.owner if row.state == "loaded" else f"{row.owner}: {row.state}, {row.reason}"
    return Finding(topic="plugins", name=row.name, state=state, detail=detail, is_required=row.distribution == CORE)


def _told(plugins: Plugins, block: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what plugins found themselves; each is asked in a process of its own."""
    for name, _ in plugins.calls("areal_findings"):
        yield from ask_plugin(name, block)


def _extras() -> Iterator[Finding]:
    for extra, cost in EXTRAS.items():
        missing = [name for name in _requirements().get(extra, ()) if not _version(name)]
        yield Finding(
            topic="extras",
            name=extra,
            state="absent" if missing else "ok",
            detail=f"{cost} (missing: {', '.join(missing)})" if missing else "installed",
            command=f"pip install '{CORE}[{extra}]'" if missing else "",
        )


def _companions(plugins: Plugins, found: Mapping[str, Any]) -> Iterator[Finding]:
    installed = {row.distribution for row in plugins.rows()}
    devices: Mapping[str, Any] = found.get("devices", {})
    is_accelerated = any(device.get("count") for name, device in devices.items() if name != "cpu")
    for name, (cost, accelerated, plain) in COMPANIONS.items():
        if name not in installed:
            command = accelerated if is_accelerated else plain
            yield Finding(topic="extras", name=name, state="absent", detail=cost, command=command)


def _requirements() -> dict[str, list[str]]:
    """Return the names of core's requirements by extra, the hard ones under ``""``; empty when not installed."""
    try:
        lines = metadata.requires(CORE) or []
    except metadata.PackageNotFoundError:
        return {}
    by_extra: dict[str, list[str]] = {}
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if name:
            by_extra.setdefault(extra[1] if extra else "", []).append(name[0])
    return by_extra


def _version(distribution: str) -> str:
    """Return the installed version, or an empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
