"""The arguments of every command that reads a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rich_click as click

_SELECTIONS = {
    "engine": "Inference engine.",
    "backend": "Training backend.",
    "algorithm": "From rewards to a loss.",
    "device": "Accelerator.",
    "reshard": "Way of the weights to the engines.",
    "cluster": "Where workers run.",
}


def recipe_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``[RECIPE] [key.sub=value ...]`` as `arguments` and the component options, each under its own name.

    Selecting another component than the recipe's drops the recipe's options for the old one (`load_recipe`).
    """
    # Panels are how --help groups options.
    command = click.option_panel("Components, instead of the recipe's", options=[f"--{name}" for name in _SELECTIONS])(
        command
    )
    for name, meaning in reversed(_SELECTIONS.items()):
        command = click.option(f"--{name}", metavar="NAME", help=meaning)(command)
    return click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY.SUB=VALUE]...")(command)


def given(selections: dict[str, str | None]) -> dict[str, str]:
    """Return the selections that the user made."""
    return {name: value for name, value in selections.items() if value is not None}


def address_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--address``, of the cluster in which the run is to find its workers' machines."""
    meaning = "Join the Ray cluster whose head is there (sets cluster.address); auto: the one of this machine."
    return click.option("--address", metavar="HOST:PORT|auto", help=meaning)(command)
