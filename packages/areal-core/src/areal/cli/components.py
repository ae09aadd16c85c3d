"""`areal components`: everything a recipe can name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import rich_click as click

from areal.cli.plugins import offer_as_json
from areal.errors import UnknownComponent, did_you_mean

if TYPE_CHECKING:
    from areal.plugins import Offer, Plugins


@click.command("components")
@click.option("--kind", metavar="KIND", help="Only engines, or backends, environments, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
def command(kind: str | None, as_json: bool, block: tuple[str, ...]) -> None:
    """List every component that a recipe can name, and whether it can be used here."""
    from areal.plugins import KINDS, discover

    kinds = [_singular(kind, list(KINDS))] if kind else list(KINDS)
    plugins = discover(block)
    offers = [offer for kind in kinds for same_name in plugins.offers(kind).values() for offer in same_name]
    if as_json:
        listed = [offer_as_json(offer, plugins) | {"distribution": offer.distribution} for offer in offers]
        click.echo(json.dumps(listed, indent=2))
    else:
        _print(offers, plugins)


def _singular(kind: str, kinds: list[str]) -> str:
    """Return the kind that ``engine`` or ``engines`` names."""
    singular = kind.removesuffix("s")
    if singular not in kinds:
        raise UnknownComponent(f"no kind {kind!r}; there are {', '.join(kinds)}{did_you_mean(singular, kinds)}")
    return singular


def _print(offers: list[Offer], plugins: Plugins) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("Kind", "Name", "From"):
        table.add_column(title)
    table.add_column("What it is, what is missing", overflow="fold")
    for offer in offers:
        about = Text(offer.component.summary)
        if obstacle := plugins.obstacle(offer):
            about.append("\n" * bool(about) + obstacle, style="yellow")
        table.add_row(Text(offer.kind), Text(offer.component.name), Text(offer.distribution.partition(" ")[0]), about)
    Console(highlight=False).print(table)
