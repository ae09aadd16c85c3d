"""`areal plugins`: who is installed, in what state, and what they offer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import rich_click as click

if TYPE_CHECKING:
    from areal.plugins import Offer, PluginRow, Plugins

STATE_STYLES = {"loaded": "green", "blocked": "yellow", "broken": "red"}


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
def command(as_json: bool, block: tuple[str, ...]) -> None:
    """List the installed plugins: state, hooks, what they offer, and what is missing."""
    from areal.plugins import discover

    plugins = discover(block)
    if as_json:
        click.echo(json.dumps([_as_json(row, plugins) for row in plugins.rows()], indent=2))
    else:
        _print(plugins)


def offer_as_json(offer: Offer, plugins: Plugins) -> dict[str, Any]:
    """Return an offer of a loaded plugin as JSON values; `obstacle` is empty when it can be used."""
    component = offer.component
    return {
        "kind": offer.kind,
        "name": component.name,
        "summary": component.summary,
        "missing": list(component.missing()),
        "install": component.install,
        "obstacle": plugins.obstacle(offer),
    }


def _as_json(row: PluginRow, plugins: Plugins) -> dict[str, Any]:
    return {
        "name": row.name,
        "distribution": row.distribution,
        "version": row.version,
        "state": row.state,
        "reason": row.reason,
        "hooks": list(row.hooks),
        "offers": [offer_as_json(offer, plugins) for offer in row.offers if row.state == "loaded"],
    }


def _print(plugins: Plugins) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("Plugin", "Distribution", "State"):
        table.add_column(title)
    table.add_column("Offers, other hooks, what is missing", overflow="fold")
    for row in plugins.rows():
        state = Text(row.state, style=STATE_STYLES[row.state])
        table.add_row(Text(row.name), Text(row.owner), state, Text("\n".join(_details(row, plugins))))
    Console(highlight=False).print(table)


def _details(row: PluginRow, plugins: Plugins) -> Iterator[str]:
    """Yield the lines about one plugin: why it is not loaded, or what it brings."""
    from areal.plugins import KINDS

    if row.state != "loaded":
        yield row.reason
        return
    for kind in KINDS:
        if names := [offer.component.name for offer in row.offers if offer.kind == kind]:
            yield f"{kind}: {', '.join(names)}"
    if others := [hook for hook in row.hooks if hook not in KINDS.values()]:
        yield f"hooks: {', '.join(others)}"
    yield from filter(None, (plugins.obstacle(offer) for offer in row.offers))
