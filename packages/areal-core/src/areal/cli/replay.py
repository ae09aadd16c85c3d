"""`areal replay`: was a training step computed as it was recorded?"""

from __future__ import annotations

import rich_click as click


@click.command("replay")
@click.argument("run", default="latest")
@click.option("--step", type=click.IntRange(min=1), required=True, metavar="N", help="The training step, from 1.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Largest relative difference that counts as equal, for devices that do not compute bit for bit.",
)
@click.option("--runs-dir", default="runs", show_default=True, metavar="FOLDER", help="Where RUN is looked for.")
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
@click.pass_context
def command(ctx: click.Context, run: str, step: int, rtol: float, runs_dir: str, block: tuple[str, ...]) -> None:
    """Compute step N of RUN (a folder, or its name) again from its journal and compare; exit code 1 if it differs.

    It begins with the newest checkpoint before the step. The run's folder is only read; the run may be going on.
    """
    from areal.app import replay

    if replay(run, step, runs_dir=runs_dir, block=block, rtol=rtol).differing:
        ctx.exit(1)
