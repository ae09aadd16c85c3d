"""What `areal doctor` asks in processes of their own: importing torch or a plugin's library may fail, crash or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, get_args

from areal.contracts.component import Component
from areal.contracts.finding import Finding, State
from areal.errors import ArealError
from areal.plugins import discover

# Importing torch takes seconds from a cold disk; beyond this it hangs.
DEADLINE_S = 120.0


def run_probe(block: Sequence[str] = (), deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Return what `probe` finds out, or ``{"failure": why it could not}``."""
    return _apart(probe.__name__, (tuple(block),), "importing torch", deadline_s)


def ask_plugin(plugin: str, block: Sequence[str] = (), deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Return what a plugin tells by `areal_findings`; what goes wrong with that is the only finding, and broken."""
    told = _apart(tell.__name__, (plugin, tuple(block)), "asking it for findings", deadline_s)
    if failure := told.get("failure"):
        detail = f"{failure}; what it knows of its library is not in this report"
        return [Finding(topic="plugins", name=plugin, state="broken", detail=detail)]
    return [Finding(**fields) for fields in told["findings"]]


def probe(block: Sequence[str]) -> None:
    """Import torch, ask every accelerator, and write one line of JSON: ``torch`` and ``devices``."""
    try:
        import torch

        found = {"version": torch.__version__, "threads": torch.get_num_threads(), "failure": ""}
    except Exception as error:  # broken installations raise whatever they like
        found = {"failure": _describe(error)}
    offers = discover(block).offers("accelerator")
    devices = {name: _ask_device(same_name[0].component) for name, same_name in offers.items()}
    _say({"torch": found, "devices": devices})


def tell(plugin: str, block: Sequence[str]) -> None:
    """Write what the plugin found as one line of JSON: ``findings``, or the ``failure``."""
    calls = dict(discover(block).calls("areal_findings"))
    try:
        _say({"findings": [asdict(finding) for finding in _findings(calls[plugin])]})
    except (Exception, SystemExit) as error:
        _say({"failure": f"areal_findings raised {_describe(error)}"})


def _findings(call: Callable[[], list[Any]]) -> list[Finding]:
    """Return what one plugin's implementation returns; TypeError when it is not findings."""
    (told,) = call() or [()]  # pluggy leaves None out
    found: list[Any] = list(told)
    for finding in found:
        if not isinstance(finding, Finding) or finding.state not in get_args(State):
            raise TypeError(f"{finding!r} is no areal.contracts.finding.Finding")
    return found


def _apart(function: str, arguments: tuple[Any, ...], doing: str, deadline_s: float) -> dict[str, Any]:
    """Return what a function of this module writes in another process, or ``{"failure": why it could not}``."""
    command = [sys.executable, "-c", f"from {__name__} import {function}; {function}(*{arguments!r})"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failure": f"{doing} did not end within {deadline_s:g} s"}
    if ended.returncode < 0:
        return {"failure": f"{doing} ended the process by {signal.Signals(-ended.returncode).name}"}
    # Behind the answer, libraries may say something as they end.
    for line in reversed(ended.stdout.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            return said
    last_words = ended.stderr.strip().splitlines() or ["no message"]
    return {"failure": f"{doing} ended the process with code {ended.returncode}: {last_words[-1]}"}


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _ask_device(component: Component) -> dict[str, Any]:
    try:
        device = component.load()(component.parse_options({}))
        if not device.is_available():
            return {"count": 0}
        return {"count": device.count(), "total_bytes": device.memory()[1]}
    except Exception as error:  # a driver or a plugin that fails is a finding
        return {"failure": _describe(error)}


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ArealError) else f"{type(error).__name__}: {text}"
