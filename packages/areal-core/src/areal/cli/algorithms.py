"""`areal algorithms`: what can be learned with, from which paper, and with which options."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import rich_click as click

from areal.errors import MissingLibrary

if TYPE_CHECKING:
    from pydantic import BaseModel

    from areal.contracts.component import Component

PAPER = re.compile(r"arXiv \d{4}\.\d{5}")


@click.command("algorithms")
@click.argument("name", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
def command(name: str, as_json: bool, block: tuple[str, ...]) -> None:
    """List the algorithms with paper and options; with NAME, every option of that one and what it means."""
    from areal.plugins import discover

    plugins = discover(block)
    names = [name] if name else list(plugins.offers("algorithm"))
    described = [_describe(plugins.resolve("algorithm", each)) for each in names]
    if as_json:
        click.echo(json.dumps(described, indent=2))
    elif name:
        _print_one(described[0])
    else:
        _print_all(described)


def _describe(component: Component) -> dict[str, Any]:
    try:
        papers = PAPER.findall(component.load().__doc__ or "")
        options = _options(component)
        missing = ""
    except MissingLibrary as error:
        papers, options, missing = [], [], str(error)
    return {
        "name": component.name,
        "summary": component.summary,
        "papers": list(dict.fromkeys(papers)),
        "missing": missing,
        "options": options,
    }


def _options(component: Component) -> list[dict[str, Any]]:
    """Return the options' names, defaults and meanings; `own` tells which the algorithm's class sets itself."""
    model: type[BaseModel] = component.options_class()
    return [
        {
            "name": name,
            "default": field.get_default(call_default_factory=True),
            "own": name in vars(model).get("__annotations__", {}),
            "meaning": " ".join((field.description or "").split()),
        }
        for name, field in model.model_fields.items()
    ]


def _print_all(described: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("Name", "Paper"):
        table.add_column(title, no_wrap=title == "Name")
    table.add_column("What it is, its own options", overflow="fold")
    for each in described:
        own = [f"{option['name']}={_yaml(option['default'])}" for option in each["options"] if option["own"]]
        about = Text(each["summary"]).append(f"\n{each['missing']}" if each["missing"] else "", style="yellow")
        table.add_row(each["name"], "\n".join(each["papers"]), about.append(f"\n{', '.join(own)}" if own else ""))
    console = Console(highlight=False)
    console.print(table)
    console.print("areal algorithms NAME explains every option of one.")


def _print_one(each: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    papers = f" ({', '.join(each['papers'])})" if each["papers"] else ""
    console.print(f"{each['name']}{papers}: {each['summary']}", markup=False)
    if each["missing"]:
        console.print(each["missing"], style="yellow", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("Option", "Default", "What it does"):
        table.add_column(title, overflow="fold")
    for option in each["options"]:
        table.add_row(option["name"], _yaml(option["default"]), option["meaning"])
    console.print(table)


def _yaml(value: Any) -> str:
    """Return a default as a recipe would write it."""
    return json.dumps(value).strip('"')
