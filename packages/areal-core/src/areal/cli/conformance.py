"""`areal conformance`: does a component keep its contract?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich_click as click

from areal.errors import ConfigError, PluginError, UnknownComponent, did_you_mean

if TYPE_CHECKING:
    from areal.plugins import Plugins


@click.command("conformance", context_settings={"ignore_unknown_options": True})
@click.argument("component")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="An option of the component, as in YAML.")
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PYTEST ARGUMENT]...")
@click.pass_context
def command(
    ctx: click.Context,
    component: str,
    options: tuple[str, ...],
    block: tuple[str, ...],
    pytest_arguments: tuple[str, ...],
) -> None:
    """Run the conformance kit on COMPONENT: kind/name, or the name alone when only one kind has it.

    What stands behind it goes to pytest, for example -k pause. The exit code is pytest's.
    """
    from areal.plugins import discover
    from areal.testing.runner import run_conformance

    plugins = discover(block)
    kind, name = which(component, plugins)
    ctx.exit(run_conformance(kind, plugins.resolve(kind, name), _table(options), pytest_arguments))


def which(component: str, plugins: Plugins) -> tuple[str, str]:
    """Return kind and name of what the user wrote; UnknownComponent, or PluginError when several kinds have it."""
    from areal.plugins import KINDS

    kind, slash, name = component.partition("/")
    if slash:
        if kind not in KINDS:
            raise UnknownComponent(f"no kind {kind!r}; there are {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
        return kind, name
    kinds = [kind for kind in KINDS if component in plugins.offers(kind)]
    if len(kinds) > 1:
        choices = " or ".join(f"{kind}/{component}" for kind in kinds)
        raise PluginError(f"several kinds have a {component!r}; write {choices}")
    if not kinds:
        names = [f"{kind}/{name}" for kind in KINDS for name in plugins.offers(kind)]
        near = did_you_mean(component, [name.partition("/")[2] for name in names])
        raise UnknownComponent(f"no component named {component!r}; installed: {', '.join(names) or 'none'}{near}")
    return kinds[0], component


def _table(options: tuple[str, ...]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs as a table, the values read as YAML."""
    import yaml

    table: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--option {option!r} is not of the form KEY=VALUE")
        try:
            table[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {key}: {value!r} is not a YAML value") from error
    return table
