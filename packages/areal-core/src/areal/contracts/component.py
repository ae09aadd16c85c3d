"""What a plugin offers: a name and dotted paths, so that listing imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from areal.errors import MissingLibrary, PluginError

API = 1
"""Major version of the hook API; a component made for another major is refused."""


OFFLOAD = "offload"
"""Capability of an engine or a backend that implements its contract's `Offloads`: it can share its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Invariant: a component can be pickled, listed and compared without importing what it names."""

    name: str
    """What recipes write, for example ``vllm``."""
    factory: str
    """``"package.module:Class"``; called as ``factory(options, context)``."""
    options: str | None = None
    """``"package.module:Options"``, a subclass of ``areal.contracts.options.Options``, or None for no options."""
    summary: str = ""
    """One line for ``areal components``."""
    requires: tuple[str, ...] = ()
    """Import names of the heavy libraries, looked for without importing them."""
    install: str = ""
    """The command that brings what ``requires`` names."""
    api: int = API
    capabilities: frozenset[str] = frozenset()
    """Optional abilities, for example ``{"lora"}``; the conformance kit tests what is declared."""

    def missing(self) -> tuple[str, ...]:
        """Return the required libraries that are not installed."""
        return tuple(name for name in self.requires if not _installed(name))

    def check_installed(self) -> None:
        """Raise MissingLibrary, with the command that helps, when a required library is absent."""
        if missing := self.missing():
            hint = f"; install it with: {self.install}" if self.install else ""
            raise MissingLibrary(f"{self.name!r} needs {', '.join(missing)}, which is not installed{hint}")

    def load(self) -> Callable[..., Any]:
        """Import and return the factory; MissingLibrary, or PluginError when the path leads nowhere."""
        self.check_installed()
        return import_object(self.factory)

    def parse_options(self, table: Mapping[str, Any]) -> Any:
        """Validate a recipe's table with the component's own options class.

        Raises pydantic.ValidationError; MissingLibrary when the class cannot be imported without it.
        """
        return self.options_class().model_validate(dict(table))

    def options_class(self) -> Any:
        """Import and return the class of the options; MissingLibrary, or PluginError when the path leads nowhere."""
        if self.options is None:
            from areal.contracts.options import Options

            return Options
        try:
            return import_object(self.options)
        except PluginError:
            self.check_installed()  # the likeliest cause has a better sentence
            raise


def import_object(path: str) -> Any:
    """Return the object that ``"package.module:name"`` names, or raise PluginError in one sentence."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise PluginError(f"{path!r} is not of the form 'package.module:Name'")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise PluginError(f"cannot import {module_name!r} for {path!r}: {error}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise PluginError(f"{module_name!r} failed while it was imported for {path!r}: {said}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no {name!r}") from None


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
