"""From a recipe's name to plain values that remember where they were written."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard, cast

import yaml

from areal.errors import ConfigError, did_you_mean

Keys = tuple[str | int, ...]
"""The keys and list positions that lead to a value, from the top of the recipe."""

# The tags that YAML's safe loader gives to plain values; a date is a text here, as JSON knows no dates.
_TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_PLAIN = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))


class Document:
    """A recipe as plain values. Invariant: every value can be traced to the line or argument it came from."""

    def __init__(self, origin: str, *, has_lines: bool = True) -> None:
        self.origin = origin
        """What messages call the whole document."""
        self.has_lines = has_lines
        """False for an argument of the command line."""
        self.data: dict[str, Any] = {}
        self._places: dict[Keys, str] = {}

    def line(self, node_line: int) -> str:
        """Return what messages call a line, counted from 0 as YAML does."""
        return f"{self.origin}:{node_line + 1}" if self.has_lines else self.origin

    def mark(self, path: Keys, place: str) -> None:
        """Note that the value at `path` was written at `place`."""
        self._places[path] = place

    def replace(self, path: Keys, place: str) -> None:
        """Note that the value at `path`, with all below it, was replaced by one written at `place`."""
        self._places = {known: at for known, at in self._places.items() if known[: len(path)] != path}
        self._places[path] = place

    def place(self, path: Keys) -> str:
        """Return where `path`, or the nearest block around it, was written."""
        for length in range(len(path), 0, -1):
            if place := self._places.get(path[:length]):
                return place
        return self.origin

    def get(self, path: Keys) -> Any:
        """Return the value at `path`, or None."""
        return value_at(self.data, path)


def is_mapping(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def value_at(data: Any, path: Keys) -> Any:
    """Return what stands at `path` in nested dicts and lists, or None."""
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def bundled_recipes() -> dict[str, Path]:
    """Return the recipes that are installed with AReaL, by name."""
    folder = Path(str(files("areal") / "recipes"))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find_recipe(source: str) -> Path:
    """Return the file that `source`, a path or a bundled recipe's name, means; ConfigError when there is none."""
    bundled = bundled_recipes()
    path = Path(source)
    if path.is_file():
        return path
    if source in bundled:
        return bundled[source]
    if path.is_dir():
        raise ConfigError(f"recipe {source!r} is a folder; name a YAML file in it")
    near = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    raise ConfigError(
        f"no recipe {source!r}: there is no such file, and the bundled recipes are {', '.join(bundled)}"
        f"{did_you_mean(source, [*bundled, *near])}"
    )


def read_document(path: Path) -> Document:
    """Read one YAML file; ConfigError names the line of whatever is wrong in it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read recipe {str(path)!r}: {error.strerror or error}") from None
    document = Document(str(path))
    data = _parse(content, document)
    if data is None:
        return document
    if not is_mapping(data):
        raise ConfigError(f"{path}: a recipe is a mapping of keys to values, but this is {describe(data)}")
    document.data = data
    return document


def parse_value(text: str, origin: str) -> Any:
    """Return the value of an override: a YAML scalar or a flow list or mapping; empty text is the empty text."""
    return "" if text == "" else _parse(text, Document(origin, has_lines=False))


def describe(value: object) -> str:
    """Return a short text for a given value, for messages."""
    if value is None:
        return "empty (null)"
    if is_mapping(value):
        return "a mapping"
    if is_list(value):
        return f"a list of {len(value)}"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(content: bytes | str, document: Document) -> Any:
    try:
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        return None if node is None else _Converter(loader, document).convert(node, ())
    except yaml.MarkedYAMLError as error:
        place = document.line(error.problem_mark.line) if error.problem_mark else document.origin
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{document.origin}: not valid YAML: {_one_line(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{document.origin}: nested too deeply, or a value that contains itself") from None


class _Converter:
    """Turns YAML nodes into plain values. Invariant: only what `yaml.safe_load` knows, and no key twice."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self.loader = loader
        self.document = document
        self.merged: set[int] = set()

    def convert(self, node: yaml.Node, path: Keys) -> Any:
        """Return the plain value of `node`, which stands at `path`."""
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._child(child, child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _TEXT:
                return node.value
            if node.tag in _PLAIN:
                return self._scalar(node)
        raise self._error(node, f"the tag {_short(node.tag)!r} is not allowed in a recipe")

    def _mapping(self, node: yaml.MappingNode, path: Keys) -> dict[str, Any]:
        if id(node) not in self.merged:
            self._refuse_duplicates(node)
            self.merged.add(id(node))
            self.loader.flatten_mapping(node)
        # After a merge the node's own keys come last, so that they win.
        return {key.value: self._child(key, value, (*path, key.value)) for key, value in node.value}

    def _child(self, written: yaml.Node, value: yaml.Node, path: Keys) -> Any:
        self.document.mark(path, self.document.line(written.start_mark.line))
        return self.convert(value, path)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return cast("Any", self.loader).construct_object(node)
        except ValueError as error:
            raise self._error(node, f"{node.value!r} is not a value: {error}") from None

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag not in _TEXT:
                shown = f"{key.value!r}" if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise self._error(key, f"keys are texts, but {shown} is not; put it in quotes")
            line = key.start_mark.line + 1
            if key.value in lines:
                raise self._error(key, f"key {key.value!r} stands twice, first in line {lines[key.value]}; keep one")
            lines[key.value] = line

    def _error(self, node: yaml.Node, sentence: str) -> ConfigError:
        return ConfigError(f"{self.document.line(node.start_mark.line)}: {sentence}")


def _short(tag: str) -> str:
    return re.sub(r"^tag:yaml\.org,2002:", "!!", tag)


def _one_line(text: str) -> str:
    return " ".join(text.split())
