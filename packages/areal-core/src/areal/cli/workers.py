"""`areal workers`: who works for a run, and who is to come or to leave while it goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import rich_click as click

_run = click.argument("run", metavar="RUN")
_runs_dir = click.option("--runs-dir", default="runs", show_default=True, metavar="FOLDER", help="Where runs are.")


@click.group("workers")
def command() -> None:
    """Show, add or remove the workers of RUN (a folder, its name, or `latest`) while it goes on."""


@command.command("list")
@_run
@_runs_dir
def list_workers(run: str, runs_dir: str) -> None:
    """Show every worker: what it is, where it runs, what it does."""
    from rich.console import Console
    from rich.table import Table

    from areal.app.control import ask

    rows: list[dict[str, Any]] = ask(run, runs_dir, do="list")
    table = Table(box=None, pad_edge=False)
    for column in ("name", "kind", "state", "pid", "node", "work"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["kind"], row["state"], str(row["pid"] or "-"), row["node"] or "-", row["work"])
    Console().print(table, highlight=False)


@command.command("add")
@_run
@click.argument("kind", type=click.Choice(["engine", "rollout"]))
@click.option("--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many.")
@_runs_dir
def add_workers(run: str, kind: str, count: int, runs_dir: str) -> None:
    """Start more workers; an engine serves once it has the current weights."""
    from areal.app.control import ask

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, run, runs_dir, do="add", kind=kind) for _ in range(count)]
        for answer in as_completed(asked):
            click.echo(f"{answer.result()} has started")


@command.command("remove")
@_run
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_runs_dir
def remove_workers(run: str, names: tuple[str, ...], runs_dir: str) -> None:
    """Let workers go by name; what they have not finished goes on elsewhere."""
    from areal.app.control import ask

    for name in names:
        ask(run, runs_dir, do="remove", name=name)
        click.echo(f"{name} has left")
