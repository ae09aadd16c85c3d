"""`areal resume`: go on after Ctrl-C, a crash or a kill."""

from __future__ import annotations

import rich_click as click

from areal.cli.recipe import address_option


@click.command("resume")
@click.argument("run", default="latest")
@click.option("--runs-dir", default="runs", show_default=True, metavar="FOLDER", help="Where RUN is looked for.")
@address_option
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
def command(run: str, runs_dir: str, address: str | None, block: tuple[str, ...]) -> None:
    """Go on with RUN (a folder, or its name) from its last checkpoint; without a name, with the latest run."""
    from areal.app import resume

    resume(run, runs_dir=runs_dir, address=address, block=block)
