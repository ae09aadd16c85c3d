"""`areal config`: the recipe as it will run, or the schema that editors use."""

from __future__ import annotations

import json

import rich_click as click

from areal.cli.recipe import given, recipe_arguments


@click.command("config")
@recipe_arguments
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of recipes, for editors, and nothing else.")
def command(arguments: tuple[str, ...], block: tuple[str, ...], schema: bool, **selections: str | None) -> None:
    """Print RECIPE with every default and override filled in.

    RECIPE is a YAML file or the name of a bundled recipe; without one, it is what `areal run` does by itself.
    """
    from areal.config import config_schema, dump, load_recipe, split_arguments
    from areal.contracts.component import Component
    from areal.errors import UnknownComponent
    from areal.plugins import discover

    if schema:
        click.echo(json.dumps(config_schema(), indent=2))
        return
    plugins = discover(block)

    def resolve(kind: str, name: str) -> Component | None:
        # A recipe for another machine can be read without that machine's plugins.
        try:
            return plugins.resolve(kind, name)
        except UnknownComponent as error:
            click.echo(f"not checked: {error}", err=True)
            return None

    source, overrides = split_arguments(arguments)
    click.echo(dump(load_recipe(source, overrides, given(selections), resolve)), nl=False)
