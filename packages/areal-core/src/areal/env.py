"""The only reader and writer of ``os.environ``; every variable AReaL knows stands here."""

from __future__ import annotations

import os
from collections.abc import Mapping


def blocked_plugins() -> tuple[str, ...]:
    """Plugin names from ``AREAL_BLOCK`` (comma separated) that must not be imported."""
    return tuple(name.strip() for name in os.environ.get("AREAL_BLOCK", "").split(",") if name.strip())


def debug_mode() -> bool:
    """Whether ``AREAL_DEBUG_MODE`` asks for the inline cluster: one process, deterministic."""
    return os.environ.get("AREAL_DEBUG_MODE", "") not in ("", "0")


def cache_dir() -> str:
    """Where converted models are kept: ``AREAL_HOME``, or ``~/.cache/areal``."""
    return os.environ.get("AREAL_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "areal")


def node_address() -> str:
    """Where other machines reach this one: ``AREAL_NODE_ADDRESS``, which the cluster sets in its workers.

    This machine's own loopback where there are no others.
    """
    return os.environ.get("AREAL_NODE_ADDRESS") or "127.0.0.1"


def apply(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children; call before importing the library they are for."""
    os.environ.update(variables)


def setdefault(variables: Mapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def find_tools_in(folder: str) -> None:
    """Let this process and its children find programs in `folder` before those elsewhere."""
    os.environ["PATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PATH")])])
