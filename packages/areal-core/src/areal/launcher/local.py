"""``python -m areal.launcher.local SCRIPT --config FILE [key.sub=value ...]``: run a user's script.

The script defines ``main(config)``, which gets the resolved recipe and usually ends in ``areal.app.run(config)``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import rich_click as click

from areal.errors import ArealError, ConfigError


@click.command()
@click.argument("script")
@click.option("--config", "recipe", metavar="FILE", help="Recipe; without it the bundled default.")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
def main(script: str, recipe: str | None, overrides: tuple[str, ...]) -> None:
    """Run SCRIPT's main(config) with the recipe of --config."""
    try:
        launch(script, recipe, overrides)
    except ArealError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


def launch(script: str, recipe: str | None, overrides: tuple[str, ...]) -> None:
    """Load the recipe, then run the script's ``main``; ConfigError when the script has none."""
    from areal.config import load_recipe
    from areal.plugins import discover

    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"the script {script!r} does not exist; give the path of a Python file with main(config)")
    config = load_recipe(recipe, overrides, resolve=discover().resolve)
    # The script's folder comes first on the path, as with `python SCRIPT`: tasks beside it can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        entry = runpy.run_path(str(path)).get("main")
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno} is not Python: {error.msg}") from error
    if not callable(entry):
        raise ConfigError(f"{script} defines no function main(config), which the launcher calls with the recipe")
    entry(config)


if __name__ == "__main__":
    main()
