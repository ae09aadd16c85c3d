"""`areal`: the group of commands. A command's module is imported when it is asked for, and for the list of commands."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import rich_click as click

from areal import __version__
from areal.errors import ArealError

COMMANDS = {
    "run": "areal.cli.run",
    "resume": "areal.cli.resume",
    "replay": "areal.cli.replay",
    "workers": "areal.cli.workers",
    "config": "areal.cli.config",
    "plugins": "areal.cli.plugins",
    "components": "areal.cli.components",
    "algorithms": "areal.cli.algorithms",
    "doctor": "areal.cli.doctor",
    "models": "areal.cli.models",
    "conformance": "areal.cli.conformance",
}
"""Core's commands: each module defines `command`, and imports anything heavy inside it."""

USER_ERROR = 2
INTERRUPTED = 130


class ArealGroup(click.RichGroup):
    """Invariant: a mistake of the user ends in one line and exit code 2, and no plugin can replace a core command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # Help is shown even when AREAL_BLOCK is misspelt; every command that needs a plugin says so.
        with suppress(ArealError):
            self._add_plugin_commands(ctx)
        return [*COMMANDS, *sorted(self.commands.keys() - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if module := COMMANDS.get(cmd_name):
            return import_module(module).command
        if cmd_name not in self.commands:
            self._add_plugin_commands(ctx)
        return self.commands.get(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ArealError as error:
            if ctx.params["debug"]:
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(USER_ERROR)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def _add_plugin_commands(self, ctx: click.Context) -> None:
        """Let plugins add theirs, once per command line: help asks for the list more than once."""
        if ctx.meta.setdefault(__name__, False):
            return
        from areal.plugins import discover

        discover().announce("areal_commands", group=self)
        ctx.meta[__name__] = True


@click.group(cls=ArealGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s", prog_name="areal")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def group(debug: bool) -> None:
    """Asynchronous reinforcement learning of language models."""


def main() -> None:
    """Run `areal`: the console script."""
    group(prog_name="areal")


if __name__ == "__main__":
    main()
