"""From pydantic's errors to one sentence each: where it stands, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal.config.schema import config_schema
from areal.config.source import Document, Keys, describe, is_list, is_mapping
from areal.errors import ConfigError, did_you_mean

_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
_WANTED = {
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text, in quotes",
}


@dataclass(slots=True)
class _Trouble:
    """Everything that is wrong with one value. Invariant: all of `wanted` is about the same path."""

    path: Keys
    error: ErrorDetails
    wanted: list[str] = field(default_factory=list[str])


def explain(
    error: ValidationError, document: Document, block: Keys = (), options_schema: Mapping[str, Any] | None = None
) -> ConfigError:
    """Return the first mistake, in one sentence, and how many more there are.

    `block` is where the validated table stands in the document, `options_schema` the JSON schema of a component's
    options when the table is theirs.
    """
    troubles: dict[Keys, _Trouble] = {}
    for details in error.errors(include_url=False):
        path = _path_in(document, block, details)
        troubles.setdefault(path, _Trouble(path, details)).wanted.append(_wanted(details))
    # A misspelt key explains a missing one, so unknown keys come first.
    first = min(troubles.values(), key=lambda trouble: trouble.error["type"] not in _UNKNOWN_KEY)
    more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
    if first.error["type"] in _UNKNOWN_KEY:
        inside = first.path[:-1]
        known = keys_at(config_schema(), inside) + keys_at(options_schema or {}, inside[len(block) :])
        return ConfigError(f"{document.place(first.path)}: {_unknown_key(first.path, known)}{more}")
    return ConfigError(f"{document.place(first.path)}: {_bad_value(first)}{more}")


def dotted(path: Keys) -> str:
    """Return a path as overrides write it."""
    return ".".join(str(key) for key in path)


def keys_at(schema: Mapping[str, Any], path: Keys) -> list[str]:
    """Return the keys that a JSON schema knows for the mapping at `path`."""
    return sorted({name for node in _nodes(schema, schema, path) for name in node.get("properties", {})})


def _nodes(root: Mapping[str, Any], node: Mapping[str, Any], path: Keys) -> Iterator[Mapping[str, Any]]:
    if reference := node.get("$ref"):
        node = root["$defs"][reference.rpartition("/")[2]]
    for option in node.get("anyOf", ()):
        yield from _nodes(root, option, path)
    if not path:
        yield node
    elif isinstance(path[0], int):
        yield from _nodes(root, node.get("items", {}), path[1:])
    elif path[0] in node.get("properties", {}):
        yield from _nodes(root, node["properties"][path[0]], path[1:])


def _path_in(document: Document, block: Keys, details: ErrorDetails) -> Keys:
    """Return the path of an error in the document, without the names pydantic gives to a union's members."""
    path = block
    last = len(details["loc"]) - 1
    for position, key in enumerate(details["loc"]):
        longer = (*path, key)
        if _exists(document, longer) or (position == last and details["type"] == "missing"):
            path = longer
    return path


def _exists(document: Document, path: Keys) -> bool:
    around = document.get(path[:-1])
    if isinstance(path[-1], int):
        return is_list(around)
    return is_mapping(around) and path[-1] in around


def _wanted(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"a list of {bound}"
    return _WANTED.get(kind) or details["msg"].removeprefix("Input should be ")


def _unknown_key(path: Keys, known: list[str]) -> str:
    key = str(path[-1])
    where = f" in '{dotted(path[:-1])}'" if len(path) > 1 else ""
    schema = config_schema()
    # An entry of a list has options of its own kind, which no other block shares.
    in_list = any(isinstance(part, int) for part in path)
    homes = [] if in_list else [name for name in keys_at(schema, ()) if key in keys_at(schema, (name,))]
    if near := did_you_mean(key, known):
        hint = near
    elif homes:
        hint = f"; it belongs in {' or '.join(repr(home) for home in homes)}"
    else:
        hint = f"; known keys: {', '.join(sorted(known))}" if known else "; it takes no keys"
    return f"unknown key {key!r}{where}{hint}"


def _bad_value(trouble: _Trouble) -> str:
    name, error = f"'{dotted(trouble.path)}'", trouble.error
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] in ("value_error", "assertion_error"):
        return f"{name}: {error['ctx']['error']}" if "ctx" in error else f"{name}: {error['msg']}"
    given = error["input"]
    if given is None:
        return f"{name} has no value; give it one, or remove the key"
    wanted = " or ".join(dict.fromkeys(trouble.wanted))
    names = [word.strip(" ,") for word in wanted.split("'")[1::2]]
    hint = did_you_mean(given, names) if isinstance(given, str) else ""
    if error["type"] == "model_type" and isinstance(given, str) and "name" in keys_at(config_schema(), trouble.path):
        hint = f"; write {{name: {given}}}"
    return f"{name} is {describe(given)}, but must be {wanted}{hint}"
