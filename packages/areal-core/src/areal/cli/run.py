"""`areal run`: a recipe, or nothing at all, becomes a run."""

from __future__ import annotations

import rich_click as click

from areal.cli.recipe import address_option, given, recipe_arguments


@click.command("run")
@recipe_arguments
@address_option
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
@click.option("--dry-run", is_flag=True, help="Read and check everything, print the resolved recipe, start nothing.")
def command(
    arguments: tuple[str, ...], address: str | None, block: tuple[str, ...], dry_run: bool, **selections: str | None
) -> None:
    """Run RECIPE (a file or a bundled recipe's name); without one, a tiny model learns to reverse digits.

    Any value of the recipe can be set behind it, for example training.max_steps=20.
    """
    from areal.app import at_address, resolve, run
    from areal.config import dump, load_recipe, split_arguments
    from areal.plugins import discover

    plugins = discover(block)
    recipe, overrides = split_arguments(arguments)
    config = at_address(load_recipe(recipe, overrides, given(selections), plugins.resolve), address, plugins)
    if dry_run:
        resolve(config, plugins)
        click.echo(dump(config), nl=False)
        return
    run(config, block=block)
