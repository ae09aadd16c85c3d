"""`areal doctor`: what is here, what is missing, what that costs and the command that brings it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import rich_click as click

if TYPE_CHECKING:
    from areal.contracts.finding import Finding
    from areal.monitor.doctor import Diagnosis

STATE_STYLES = {"ok": "green", "low": "yellow", "absent": "yellow", "broken": "red"}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--block", metavar="NAME", multiple=True, help="Do not load this plugin; may be given often.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, block: tuple[str, ...]) -> None:
    """Look at Python, torch, devices and plugins; exit code 0 when a run is possible here."""
    from areal.monitor.doctor import diagnose

    diagnosis = diagnose(block)
    if as_json:
        click.echo(json.dumps(_as_json(diagnosis), indent=2))
    else:
        _print(diagnosis)
    ctx.exit(0 if diagnosis.can_run else 1)


def _as_json(diagnosis: Diagnosis) -> dict[str, object]:
    from dataclasses import asdict

    return {"can_run": diagnosis.can_run, "findings": [asdict(finding) for finding in diagnosis.findings]}


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column()
    table.add_column(overflow="fold")
    topic = ""
    for finding in diagnosis.findings:
        name = "" if finding.topic == topic else finding.topic
        topic = finding.topic
        table.add_row(
            Text(name, style="bold"),
            Text(finding.name),
            Text(finding.state, style=STATE_STYLES[finding.state]),
            Text(_sentence(finding)),
        )
    console.print(table)
    console.print("A run is possible here." if diagnosis.can_run else "No run is possible here yet.", style="bold")


def _sentence(finding: Finding) -> str:
    return f"{finding.detail}\n{finding.command}" if finding.command else finding.detail
