"""Another Python environment for the engines (`engine.python`): what is asked of it before anything starts."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from areal.contracts.component import Component
from areal.errors import ConfigError, MissingLibrary

CORE = "areal-core"
DEADLINE_S = 60.0
"""Nothing heavy is imported; what is slow is the first start from a cold disk."""
MOST_WORDS = 200
"""Of what a program says that is no Python: it may repeat all that it was given."""


def find_interpreter(given: str, engine: Component, packages: Iterable[str]) -> str:
    """Return the absolute path of the interpreter `given`, in which `engine` can run as a worker.

    `packages`: what else a worker unpickles there. Raises ConfigError or MissingLibrary in one sentence.
    """
    # Not resolved: the interpreter of a virtual environment is a link, and its place is what makes it that one.
    path = Path(given).expanduser().absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(f"'engine.python' {given!r} is no executable; name an interpreter, such as ENV/bin/python")
    needed = dict.fromkeys([_package(engine.factory), *packages])
    there = _ask(path, [*needed, *engine.requires])
    _check_versions(path, there)
    found = there["found"]
    hint = f"; install it there with: {engine.install}" if engine.install else "; install it there too"
    if absent := [name for name in needed if not found[name]]:
        raise MissingLibrary(f"engine {engine.name!r} needs {', '.join(absent)} in {path}, where it is not{hint}")
    if absent := [name for name in engine.requires if not found[name]]:
        raise MissingLibrary(f"{engine.name!r} needs {', '.join(absent)}, which is not installed for {path}{hint}")
    return str(path)


def package_of(thing: object) -> str:
    """Return the top-level package that defines an object's class."""
    return _package(type(thing).__module__)


def _package(dotted: str) -> str:
    return dotted.partition(":")[0].partition(".")[0]


def _check_versions(path: Path, there: dict[str, Any]) -> None:
    """Refuse what cannot talk to this process: Ray compares its version and Python's, and messages are pickled."""
    ours, theirs = sys.version_info[:2], tuple(there["python"][:2])
    if ours != theirs:
        raise ConfigError(
            f"{path} is Python {_dotted(theirs)} and this is {_dotted(ours)}; workers of one run need the same, so "
            f"make that environment with Python {_dotted(ours)}"
        )
    for name in (CORE, "ray"):
        version = _version(name)
        if not there["versions"][name]:
            raise ConfigError(f"{path} has no {name}; install it with: {path} -m pip install {name}=={version}")
        if there["versions"][name] != version:
            raise ConfigError(
                f"{path} has {name} {there['versions'][name]} and this environment has {version}; workers of one run "
                f"need the same: {path} -m pip install {name}=={version}"
            )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"'engine.python' needs {distribution} installed here, to compare versions; pip install {distribution}"
        ) from None


def _ask(path: Path, modules: list[str]) -> dict[str, Any]:
    """Return what `report` says in the interpreter at `path`."""
    source = f"from __future__ import annotations\n{inspect.getsource(report)}\nreport({modules!r}, {[CORE, 'ray']!r})"
    try:
        ended = subprocess.run(
            [str(path), "-c", source],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=DEADLINE_S,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"'engine.python' {path} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"'engine.python' {path} did not answer within {DEADLINE_S:g} s") from None
    try:
        there: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return {name: there[name] for name in ("python", "versions", "found")}
    except (IndexError, ValueError, TypeError, KeyError):
        last_words = (ended.stderr.strip().splitlines() or [f"it ended with code {ended.returncode}"])[-1][:MOST_WORDS]
        raise ConfigError(f"'engine.python' {path} cannot be run as a Python of today: {last_words}") from None


def report(modules: list[str], distributions: list[str]) -> None:
    """Write what this interpreter has as one line of JSON; sent to the other one alone, so it imports for itself."""
    import json
    import sys
    from importlib import metadata, util

    def is_there(module: str) -> bool:
        try:
            return util.find_spec(module) is not None
        except (ImportError, ValueError):
            return False

    def version(distribution: str) -> str:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return ""

    found = {
        "python": list(sys.version_info[:3]),
        "versions": {name: version(name) for name in distributions},
        "found": {name: is_there(name) for name in modules},
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")
