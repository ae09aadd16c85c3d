"""`areal models`: models that come without a model hub."""

from __future__ import annotations

from pathlib import Path

import rich_click as click


@click.group("models")
def command() -> None:
    """List and fetch the models that recipes can name without a path."""


@command.command("list")
def list_models() -> None:
    """List the models that can be pulled, and where those are that have been."""
    from rich.console import Console
    from rich.table import Table

    from areal.builtins.models.registry import MODELS, default_folder, is_complete

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("Name", "What it is", "Where it is"):
        table.add_column(title, overflow="fold")
    for name, model in MODELS.items():
        folder = default_folder(name)
        table.add_row(name, model.summary, str(folder) if is_complete(folder) else f"run: areal models pull {name}")
    Console(highlight=False).print(table)


@command.command("pull")
@click.argument("name")
@click.option("--to", metavar="DIR", type=click.Path(path_type=Path), help="Folder to make; else AREAL_HOME/models.")
def pull_model(name: str, to: Path | None) -> None:
    """Download model NAME, convert it to an HF folder and print the folder's path."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from areal.builtins.models.registry import pull

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        stages = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage)
            bars.update(stages[stage], completed=done, total=total or None)

        folder, made = pull(name, to, progress)
    click.echo(f"{name} is {'ready' if made else 'already there'}: ", err=True, nl=False)
    click.echo(folder)
