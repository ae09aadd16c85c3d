"""What the command line changes in a recipe before it is validated: selections and overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.config.explain import dotted
from areal.config.schema import RunConfig
from areal.config.source import Document, Keys, describe, is_list, is_mapping, parse_value, value_at
from areal.errors import ConfigError, did_you_mean

SELECTABLE = ("engine", "backend", "algorithm", "device", "reshard", "cluster")
"""Blocks whose component an option of ``areal run`` selects."""


def select(document: Document, selections: Mapping[str, str]) -> None:
    """Name components, without the options that the recipe gives to another component of that block."""
    for block, name in selections.items():
        if block not in SELECTABLE:
            raise ConfigError(f"cannot select {block!r}; only {', '.join(SELECTABLE)}{did_you_mean(block, SELECTABLE)}")
        place = f"command line, --{block} {name}"
        if block == "device":
            document.data[block] = name
            document.replace((block,), place)
            continue
        default = RunConfig.model_fields[block].get_default(call_default_factory=True)
        written = document.data.get(block, {})
        if not is_mapping(written) or written.get("name", default.name) == name:
            continue
        document.replace((block,), place)
        kept = {key: value for key, value in written.items() if key in ("replicas", "group_size")}
        document.data[block] = {"name": name, **kept}


def override(document: Document, argument: str) -> None:
    """Set one value from ``key.sub=value``; a number in the key is a list position."""
    key, separator, text = argument.partition("=")
    path: Keys = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    if not separator or "" in path:
        raise ConfigError(f"{argument!r} is not of the form key.sub=value")
    place = f"command line, {argument}"
    value = parse_value(text, place)
    parent: Any = document.data
    for depth, step in enumerate(path):
        _check_step(parent, path[:depth], step, place)
        if depth == len(path) - 1:
            parent[step] = value
        elif value_at(parent, (step,)) is None:
            parent[step] = _beginning(path[: depth + 1], path[depth + 1])
            document.replace(path[: depth + 1], place)
        parent = parent[step]
    document.replace(path, place)


def _check_step(parent: Any, path: Keys, step: str | int, place: str) -> None:
    """Refuse a step of an override that leads nowhere; unknown keys are the schema's business."""
    name = f"'{dotted(path)}'" if path else "the recipe"
    if is_list(parent):
        if not isinstance(step, int):
            raise ConfigError(f"{place}: {name} is a list; give a position, as in {dotted((*path, 0, step))}")
        if step >= len(parent):
            raise ConfigError(f"{place}: {name} has {len(parent)} entries, counted from 0, so there is no {step}")
    elif isinstance(step, int) or not is_mapping(parent):
        raise ConfigError(f"{place}: {name} is {describe(parent)}, so there is no {str(step)!r} in it")


def _beginning(path: Keys, following: str | int) -> Any:
    """Return what an override starts from where the recipe says nothing: the defaults of a list, or no keys."""
    return (value_at(RunConfig().model_dump(mode="json"), path) or []) if isinstance(following, int) else {}
