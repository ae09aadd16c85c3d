"""What this machine has for a run, what each missing piece costs, and the command that brings it.

torch is imported in a process of its own only: the report comes even when importing it fails or crashes.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from areal import env
from areal.contracts.component import Component
from areal.errors import ArealError
from areal.plugins import PluginRow, Plugins, discover

CORE = "areal-core"
LOWEST_PYTHON = (3, 11)
# Importing torch takes seconds from a cold disk; beyond this it hangs.
PROBE_DEADLINE_S = 120.0
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
    "areal-vllm": "no engine vllm: its plugin is not published yet",
    "areal-sglang": "no engine sglang: its plugin is not published yet",
}
"""AReaL's own plugins, and what a run cannot have without each."""

State = Literal["ok", "low", "absent", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. Invariant: unless `state` is ok, `detail` says what that costs."""

    topic: str
    name: str
    state: State
    detail: str
    command: str = ""
    """Brings what is missing."""
    is_required: bool = False
    """Whether no run at all is possible while it is absent or broken."""


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
    return Diagnosis(
        (
            _python(),
            *_libraries(),
            *_torch_and_devices(run_probe(block)),
            *_machine(Path(folder)),
            *_plugins(plugins),
            *_extras(),
            *_companions(plugins),
        )
    )


def run_probe(block: Sequence[str] = (), deadline_s: float = PROBE_DEADLINE_S) -> dict[str, Any]:
    """Return what `probe` finds out in a process of its own, or ``{"failure": why it could not}``."""
    command = [sys.executable, "-c", f"from {__name__} import probe; probe({tuple(block)!r})"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failure": f"importing torch did not end within {deadline_s:g} s"}
    if ended.returncode < 0:
        return {"failure": f"importing torch ended the process by {signal.Signals(-ended.returncode).name}"}
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last_words = ended.stderr.strip().splitlines() or ["no message"]
        return {"failure": f"importing torch ended the process with code {ended.returncode}: {last_words[-1]}"}


def probe(block: Sequence[str]) -> None:
    """Import torch, ask every accelerator, and write one line of JSON: ``torch`` and ``devices``."""
    try:
        import torch

        found = {"version": torch.__version__, "threads": torch.get_num_threads(), "failure": ""}
    except Exception as error:  # broken installations raise whatever they like
        found = {"failure": _describe(error)}
    offers = discover(block).offers("accelerator")
    devices = {name: _ask_device(same_name[0].component) for name, same_name in offers.items()}
    sys.stdout.write("\n" + json.dumps({"torch": found, "devices": devices}) + "\n")


def _ask_device(component: Component) -> dict[str, Any]:
    try:
        device = component.load()(component.parse_options({}))
        if not device.is_available():
            return {"count": 0}
        return {"count": device.count(), "total_bytes": device.memory()[1]}
    except Exception as error:  # a driver or a plugin that fails is a finding
        return {"failure": _describe(error)}


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ArealError) else f"{type(error).__name__}: {text}"


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


def _companions(plugins: Plugins) -> Iterator[Finding]:
    installed = {row.distribution for row in plugins.rows()}
    for name, cost in COMPANIONS.items():
        if name not in installed:
            yield Finding(topic="extras", name=name, state="absent", detail=cost)


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
