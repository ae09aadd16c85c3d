"""The conformance kit from the shell: one component, its kind's test class, a pytest of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from areal.contracts.component import Component
from areal.errors import ConfigError, MissingLibrary, PluginError

KITS = {
    "engine": "areal.testing.engine:EngineConformance",
    "backend": "areal.testing.backend:BackendConformance",
    "resharder": "areal.testing.resharder:ResharderConformance",
    "accelerator": "areal.testing.accelerator:AcceleratorConformance",
    "environment": "areal.testing.environment:EnvironmentConformance",
}
"""The test class of each kind that has a kit; each takes its subject from the fixtures `component` and `options`."""
NEEDED = ("pytest", "pytest_asyncio", "pytest_timeout")

_SETTINGS = """\
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
timeout = 300
"""
_MODULE = '''\
"""Written by `areal conformance`: {kind} {name!r} against the conformance kit."""

import pytest

from areal.contracts.component import Component
from {module} import {kit}


class Test{title}({kit}):
{attributes}    @pytest.fixture
    def component(self):
        return {component!r}

    @pytest.fixture
    def options(self):
        return {options!r}
'''


def run_conformance(
    kind: str, component: Component, options: Mapping[str, Any], pytest_arguments: Sequence[str] = ()
) -> int:
    """Run the kit on one component and return pytest's exit code: 0 when every case passed.

    Raises PluginError for a kind without a kit, MissingLibrary when the component or pytest is not installed,
    ConfigError when the component does not take the options.
    """
    if kind not in KITS:
        raise PluginError(f"there is no conformance kit for {kind} {component.name!r}; kits: {', '.join(KITS)}")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise MissingLibrary(
            f"the conformance kit needs {', '.join(missing)}, which is not installed; "
            "install it with: pip install 'areal-core[test]'"
        )
    component.check_installed()
    _check_options(kind, component, options)
    with TemporaryDirectory(prefix="areal-conformance-") as folder:
        module = Path(folder, "test_conformance.py")
        module.write_text(_written(kind, component, options))
        settings = Path(folder, "pytest.ini")
        settings.write_text(_SETTINGS)
        command = [sys.executable, "-m", "pytest", "-c", str(settings), "-p", "no:cacheprovider", str(module)]
        return subprocess.run([*command, *pytest_arguments], check=False).returncode


def _check_options(kind: str, component: Component, options: Mapping[str, Any]) -> None:
    from pydantic import ValidationError

    try:
        component.parse_options(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{kind} {component.name!r} does not take the option {key!r}: {first['msg']}") from error


def _written(kind: str, component: Component, options: Mapping[str, Any]) -> str:
    module, _, kit = KITS[kind].partition(":")
    # A component's repr is the expression that makes it.
    return _MODULE.format(
        kind=kind,
        name=component.name,
        module=module,
        kit=kit,
        title="".join(re.findall(r"[A-Za-z0-9]+", component.name.title())),
        attributes=_attributes(kind, component, options),
        component=component,
        options=dict(options),
    )


def _attributes(kind: str, component: Component, options: Mapping[str, Any]) -> str:
    """Return what the kit is told in class attributes: an engine whose options do not say is asked less."""
    if kind != "engine":
        return ""
    return f"    kv_on_update = {getattr(component.parse_options(options), 'kv_on_update', None)!r}\n\n"
