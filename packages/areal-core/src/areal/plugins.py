"""Who is installed and what they offer: plugins are found, blocked, examined and listed, and names become components.

A plugin is an entry point of the group ``areal``. A plugin that cannot be used is a row in a table, not a crash.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pluggy

from areal import env, hookspecs
from areal.contracts.component import API, Component, import_object
from areal.errors import MissingLibrary, PluginError, UnknownComponent, did_you_mean

GROUP = "areal"
KINDS: Mapping[str, str] = {
    "engine": "areal_engines",
    "backend": "areal_backends",
    "resharder": "areal_resharders",
    "accelerator": "areal_accelerators",
    "environment": "areal_environments",
    "algorithm": "areal_algorithms",
    "tracker": "areal_trackers",
    "cluster": "areal_clusters",
}
"""Each kind of component and the hook that offers it."""

State = Literal["loaded", "blocked", "broken"]

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One component and who offers it. Invariant: made without importing what the component names."""

    kind: str
    component: Component
    distribution: str
    """Name and version of the distribution, for example ``areal-vllm 0.1.0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRow:
    """One installed plugin. Invariant: unless `state` is loaded, `reason` says why, and nothing of it is used."""

    name: str
    """Name of the entry point."""
    distribution: str
    version: str
    state: State
    reason: str = ""
    hooks: tuple[str, ...] = ()
    """Hooks it implements."""
    offers: tuple[Offer, ...] = ()
    """For a plugin refused because of its API: what it would offer."""

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


class Plugins:
    """All plugins of this process. Invariant: only loaded plugins are ever called or resolved to."""

    def __init__(self, rows: Iterable[PluginRow], manager: pluggy.PluginManager) -> None:
        self._rows = tuple(rows)
        self._manager = manager

    def rows(self) -> tuple[PluginRow, ...]:
        """Return every plugin found, the builtin one first."""
        return self._rows

    def offers(self, kind: str) -> dict[str, tuple[Offer, ...]]:
        """Return everything offered of a kind, by name; a name with more than one offer cannot be resolved."""
        found: dict[str, tuple[Offer, ...]] = {}
        for row in self._rows:
            if row.state == "loaded":
                for offer in row.offers:
                    if offer.kind == kind:
                        found[offer.component.name] = (*found.get(offer.component.name, ()), offer)
        return dict(sorted(found.items()))

    def resolve(self, kind: str, name: str) -> Component:
        """Return the component that a recipe calls `name`; nothing it names is imported.

        An environment may also be a class of one's own, ``"package.module:Class"``: that module is imported.
        Raises UnknownComponent, or PluginError when two plugins offer the name.
        """
        if kind == "environment" and ":" in name:
            return own_environment(name)
        offers = self.offers(kind)
        if name not in offers:
            raise UnknownComponent(self._unknown(kind, name))
        first, *rivals = offers[name]
        if rivals:
            raise PluginError(conflict(offers[name]))
        return first.component

    def obstacle(self, offer: Offer) -> str:
        """Return one sentence on what keeps an offer from being used and what to do, or nothing."""
        if len(rivals := self.offers(offer.kind)[offer.component.name]) > 1:
            return conflict(rivals)
        try:
            offer.component.check_installed()
        except MissingLibrary as error:
            return str(error)
        return ""

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Return the first answer to a question hook, or None; PluginError when a plugin fails before one answers."""
        for plugin, call in self.calls(name, arguments):
            try:
                answer = call()
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"plugin {plugin!r} failed in {name}: {_describe(error)}; --block it to go on without"
                ) from error
            if answer is not None:
                return answer
        return None

    def announce(self, name: str, /, **arguments: Any) -> None:
        """Call an announcement hook; a plugin that raises is logged by name and the others are still called."""
        for plugin, call in self.calls(name, arguments):
            try:
                call()
            except (Exception, SystemExit) as error:
                _log.warning("plugin %r failed in %s and was passed over: %s", plugin, name, _describe(error))
                _log.debug("the failure of plugin %r", plugin, exc_info=error)

    def calls(self, name: str, arguments: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the name of each plugin that implements a hook and its call, the last registered first."""
        implementations: list[pluggy.HookImpl] = getattr(self._manager.hook, name).get_hookimpls()
        for implementation in reversed(implementations):
            others = [other.plugin for other in implementations if other.plugin is not implementation.plugin]
            alone = self._manager.subset_hook_caller(name, others)
            yield implementation.plugin_name, partial(alone, **(arguments or {}))

    def _unknown(self, kind: str, name: str) -> str:
        offers = self.offers(kind)
        asked = f"no {kind} named {name!r}"
        for row in self._rows:
            would_offer = any((offer.kind, offer.component.name) == (kind, name) for offer in row.offers)
            if row.state != "loaded" and (would_offer or _is_called(name, row)):
                return f"{asked}; the plugin {row.owner} is {row.state}: {row.reason}"
        own = "; a class of your own is written package.module:Class" if kind == "environment" else ""
        return f"{asked}; installed: {', '.join(offers) or 'none'}{did_you_mean(name, offers)}{own}"


def discover(block: Iterable[str] = (), *, missing_ok: bool = False) -> Plugins:
    """Find and load all plugins but those named by `block` or ``AREAL_BLOCK``, which are not even imported.

    A name is an entry point's or a distribution's; PluginError when a name to block is no plugin's, unless
    `missing_ok`.
    """
    found = list(_entry_points())
    blocked = _blocked(found, block, missing_ok)
    manager = _manager()
    return Plugins((_load(candidate, blocked(candidate), manager) for candidate in found), manager)


def conflict(offers: tuple[Offer, ...]) -> str:
    """Return the sentence for a name that several plugins offer."""
    owners = sorted(offer.distribution for offer in offers)
    kind, name = offers[0].kind, offers[0].component.name
    return f"{kind} {name!r} is offered by {' and by '.join(owners)}; keep one and --block the other"


def own_environment(path: str) -> Component:
    """Return a component for the class at ``"package.module:Class"``, which needs `prompts` and `episode`.

    Its options class, if it has one, stands beside it under the name ``<Class>Options``. The module is looked for in
    the working folder too, behind everything installed.
    """
    if not _DOTTED.fullmatch(path):
        raise PluginError(f"{path!r} is not of the form 'package.module:Class'")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    found = import_object(path)
    if missing := [method for method in ("prompts", "episode") if not callable(getattr(found, method, None))]:
        raise PluginError(f"{path!r} is no environment: it has no method {' and no '.join(missing)}")
    options = f"{path}Options"
    has_options = hasattr(inspect.getmodule(found), options.partition(":")[2])
    return Component(name=path, factory=path, options=options if has_options else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """An entry point that was found and not yet imported. Invariant: no two candidates name the same object."""

    name: str
    value: str
    distribution: str
    version: str
    load: Callable[[], Any]

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def row(self, state: State, reason: str = "", **more: Any) -> PluginRow:
        return PluginRow(
            name=self.name, distribution=self.distribution, version=self.version, state=state, reason=reason, **more
        )


def _entry_points() -> Iterator[_Candidate]:
    """Yield each entry point once, core's own first, then by distribution: the order is that of no folder."""
    candidates = [
        _Candidate(
            name=point.name,
            value=point.value,
            distribution=(point.dist and point.dist.name) or "unknown",
            version=(point.dist and point.dist.version) or "",
            load=point.load,
        )
        for point in metadata.entry_points(group=GROUP)
    ]
    seen: set[str] = set()
    for candidate in sorted(candidates, key=lambda c: (c.distribution != "areal-core", c.distribution, c.name)):
        if candidate.value not in seen:
            seen.add(candidate.value)
            yield candidate


def _blocked(found: list[_Candidate], block: Iterable[str], missing_ok: bool) -> Callable[[_Candidate], str]:
    """Return a function that says what blocks a candidate: ``--block vllm``, or nothing."""
    sources = {name: f"--block {name}" for name in block}
    sources |= {name: f"AREAL_BLOCK={name}" for name in env.blocked_plugins() if name not in sources}
    for name, source in sources.items():
        if not missing_ok and not any(_is_called(name, candidate) for candidate in found):
            names = sorted({known for candidate in found for known in (candidate.name, candidate.distribution)})
            raise PluginError(
                f"{source} names no plugin; installed: {', '.join(names) or 'none'}{did_you_mean(name, names)}"
            )
    return lambda candidate: next((source for name, source in sources.items() if _is_called(name, candidate)), "")


def _is_called(name: str, plugin: _Candidate | PluginRow) -> bool:
    return _canonical(name) in (_canonical(plugin.name), _canonical(plugin.distribution))


def _canonical(name: str) -> str:
    """Return a distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def _load(candidate: _Candidate, blocked_by: str, manager: pluggy.PluginManager) -> PluginRow:
    """Import, examine and register one plugin; whatever goes wrong becomes the row's reason."""
    if blocked_by:
        return candidate.row("blocked", blocked_by)
    # A manager of its own: what is refused here never touches the others.
    trial = _manager()
    try:
        plugin = candidate.load()
        hooks = _examine(plugin, trial)
        offers = tuple(_collect(candidate, hooks, trial))
    except (Exception, SystemExit) as error:
        return candidate.row("broken", _describe(error))
    if refused := next((offer.component for offer in offers if offer.component.api != API), None):
        reason = (
            f"{refused.name!r} is made for hook API {refused.api}, and this AReaL has API {API}; "
            f"install a version of {candidate.distribution} made for it"
        )
        return candidate.row("broken", reason, hooks=hooks, offers=offers)
    manager.register(plugin, f"{candidate.distribution}/{candidate.name}")
    return candidate.row("loaded", hooks=hooks, offers=offers)


def _examine(plugin: Any, trial: pluggy.PluginManager) -> tuple[str, ...]:
    """Return the hooks that a plugin implements; PluginError when one of them is not as the hookspecs say."""
    known = [name for name in vars(hookspecs) if name.startswith("areal_")]
    try:
        trial.register(plugin)
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error)) from error
    implemented = {caller.name: caller for caller in trial.get_hookcallers(plugin) or ()}
    for name, caller in implemented.items():
        if not caller.has_spec() and not all(implementation.optionalhook for implementation in caller.get_hookimpls()):
            raise PluginError(f"{name!r} is no hook{did_you_mean(name, known)}")
    for name in _own_functions(plugin):
        if name.startswith("areal_") and name not in implemented:
            raise PluginError(f"{name!r} is not marked @hookimpl; mark it, or do not begin its name with 'areal_'")
    return tuple(name for name in known if name in implemented)


def _own_functions(plugin: Any) -> Iterator[str]:
    """Yield the names of functions that the plugin defines; what a module imported is not its own."""
    for name in dir(plugin):
        function = inspect.getattr_static(plugin, name, None)
        is_imported = inspect.ismodule(plugin) and getattr(function, "__module__", None) != plugin.__name__
        if inspect.isroutine(function) and not is_imported:
            yield name


def _collect(candidate: _Candidate, hooks: tuple[str, ...], trial: pluggy.PluginManager) -> Iterator[Offer]:
    """Yield what a plugin offers; PluginError when it is not components, or when a name stands twice."""
    seen: set[tuple[str, str]] = set()
    for kind, hook in KINDS.items():
        for component in _ask(hook, getattr(trial.hook, hook)) if hook in hooks else ():
            if not isinstance(component, Component):
                raise PluginError(f"{hook} offers {component!r}, which is no areal.Component")
            _check_written(kind, component)
            if (kind, component.name) in seen:
                raise PluginError(f"{hook} offers {component.name!r} twice")
            seen.add((kind, component.name))
            yield Offer(kind=kind, component=component, distribution=candidate.owner)


def _ask(hook: str, caller: Callable[[], list[Any]]) -> list[Any]:
    """Return what one plugin's hook offers; it is the only implementation behind `caller`."""
    try:
        # pluggy leaves None out of its list.
        result = next(iter(caller()), None)
        if isinstance(result, Iterable):
            return list(result)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{hook} raised {_describe(error)}") from error
    raise PluginError(f"{hook} returned {result!r}, not a list of areal.Component")


def _check_written(kind: str, component: Component) -> None:
    if not isinstance(component.name, str) or not component.name:
        raise PluginError(f"a component of kind {kind!r} is named {component.name!r}; recipes need a word")
    for path in (component.factory, component.options):
        if path is not None and not (isinstance(path, str) and _DOTTED.fullmatch(path)):
            raise PluginError(f"{kind} {component.name!r} names {path!r}, which is not 'package.module:Name'")


def _describe(error: BaseException) -> str:
    """Return an exception as one line; PluginErrors are sentences already."""
    text = " ".join(str(error).split())
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
