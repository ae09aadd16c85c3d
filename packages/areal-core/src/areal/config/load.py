"""Reading a recipe (file, selections, overrides, schema, combinations, components) and writing it out again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, PydanticUserError, ValidationError

from areal.config.check import problems
from areal.config.edit import override, select
from areal.config.explain import dotted, explain
from areal.config.schema import RunConfig, Selected
from areal.config.source import Document, Keys, describe, find_recipe, is_list, is_mapping, read_document, value_at
from areal.contracts.backend import DistributedOptions
from areal.contracts.component import Component
from areal.errors import ConfigError, PluginError

T = TypeVar("T", bound=BaseModel)
Resolve = Callable[[str, str], Component | None]
"""Returns the component of a kind and name; raises UnknownComponent, or returns None to leave it unchecked."""

DEFAULT_RECIPE = "default"
_WHOLE = re.compile(r"[-+]?\d+(\.0*)?[eE]\+?\d{1,2}")


def load_recipe(
    source: str | None = None,
    overrides: Sequence[str] = (),
    selections: Mapping[str, str] | None = None,
    resolve: Resolve | None = None,
) -> RunConfig:
    """Read a recipe and refuse, in one sentence with file and line, whatever cannot run.

    `source`: a YAML file or a bundled recipe's name; None is the bundled ``default``.
    `selections`: component names by block (``engine``, ``backend``, ``algorithm``, ``device``, ``reshard``,
    ``cluster``). Another component than the recipe's starts without the recipe's options for the old one, which would
    mean nothing to it (`engine.replicas` and `algorithm.group_size` stay, `engine.python` goes with its engine); the
    same component keeps them.
    `overrides`: ``key.sub=value``, applied in order after the selections; the value is YAML, a number in the key is a
    list position. Unlike a selection, ``engine.name=x`` changes the name alone.
    `resolve`: finds components, whose owners then validate their options; without it options stay unchecked.

    Raises ConfigError, and the PluginError of `resolve` with the place of the name in front.
    """
    document = read_document(find_recipe(source or DEFAULT_RECIPE))
    select(document, selections or {})
    for argument in overrides:
        override(document, argument)
    config = _validate(lambda: RunConfig.model_validate(document.data), document)
    for path, sentence in problems(config):
        raise ConfigError(f"{document.place(path)}: {sentence}")
    if resolve is None:
        return config
    for selected in config.selected():
        options = _check_options(document, selected, resolve)
        if isinstance(options, DistributedOptions):
            _check_mesh(document, selected, options, config)
    # A number that an options class asked for may have replaced its text.
    return RunConfig.model_validate(document.data)


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe and the overrides among a command's arguments: ``[RECIPE] [key.sub=value ...]``."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Return the resolved recipe as plain values: dicts, lists, texts and numbers."""
    return {key: _plain(value) for key, value in config.model_dump().items()}


def dump(config: RunConfig) -> str:
    """Return the resolved recipe as YAML, which loads again to an equal value."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, width=120)


def _check_options(document: Document, selected: Selected, resolve: Resolve) -> BaseModel | None:
    """Let the owner of a component's options validate them; return them where the owner is known."""
    place = document.place((*selected.path, "type" if selected.kind == "environment" else "name"))
    try:
        component = resolve(selected.kind, selected.name)
    except PluginError as error:
        raise type(error)(f"{place}: {error}") from None
    if component is None:
        return None

    def parse() -> BaseModel:
        table = document.get(selected.path)
        return component.parse_options({key: table[key] for key in selected.options})

    try:
        options = component.options_class()
    except PluginError as error:
        raise type(error)(f"{place}: {error}") from None
    return _validate(parse, document, selected.path, selected.options, _schema_of(options))


def _check_mesh(document: Document, selected: Selected, options: DistributedOptions, config: RunConfig) -> None:
    """Refuse what the backend cannot spread, at the place of the first of its options that the reason names."""
    if why := options.problem(config.trainer_devices, config.model, config.training):
        key = next((key for key in selected.options if re.search(rf"\b{re.escape(key)}\b", why)), "name")
        raise ConfigError(f"{document.place((*selected.path, key))}: backend {selected.name!r}: {why}")


def _schema_of(options: type[BaseModel]) -> dict[str, Any]:
    try:
        return options.model_json_schema()
    except PydanticUserError:  # an options class may hold types that JSON does not know
        return {}


def _validate(
    parse: Callable[[], T],
    document: Document,
    block: Keys = (),
    table: Mapping[str, Any] | None = None,
    options_schema: Mapping[str, Any] | None = None,
) -> T:
    """Return what `parse` makes of the document's table at `block`; ConfigError."""
    try:
        checked = parse()
    except ValidationError as error:
        if _read_whole_numbers(document, block, error):
            return _validate(parse, document, block, table, options_schema)
        raise explain(error, document, block, options_schema) from None
    dumped = checked.model_dump()
    for path, given in _booleans(document.data if table is None else table, ()):
        # Python takes true for 1.
        if type(value_at(dumped, path)) in (int, float):
            where = (*block, *path)
            raise ConfigError(f"{document.place(where)}: '{dotted(where)}' is {describe(given)}, but must be a number")
    return checked


def _read_whole_numbers(document: Document, block: Keys, error: ValidationError) -> bool:
    """Write 10000 in the place of a text like ``1e4`` where a whole number is wanted; say whether there was one."""
    found = False
    for details in error.errors(include_url=False):
        text, path = details["input"], (*block, *details["loc"])
        if details["type"] == "int_parsing" and document.get(path) == text and _WHOLE.fullmatch(text):
            document.get(path[:-1])[path[-1]] = int(float(text))
            found = True
    return found


def _booleans(value: Any, path: Keys) -> Iterator[tuple[Keys, bool]]:
    if isinstance(value, bool):
        yield path, value
    elif is_mapping(value):
        for key, inner in value.items():
            yield from _booleans(inner, (*path, key))
    elif is_list(value):
        for index, inner in enumerate(value):
            yield from _booleans(inner, (*path, index))


def _plain(value: Any) -> Any:
    if is_mapping(value):
        return {key: _plain(inner) for key, inner in value.items()}
    if is_list(value) or isinstance(value, tuple):
        return [_plain(inner) for inner in cast("list[Any]", value)]
    return value
