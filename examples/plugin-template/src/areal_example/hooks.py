"""What this plugin offers. Every `areal` command imports this module: keep heavy imports out of it."""

from __future__ import annotations

from areal import Component, hookimpl


@hookimpl
def areal_environments() -> list[Component]:
    return [
        Component(
            name="sort_digits",
            factory="areal_example.sort_digits:SortDigits",
            options="areal_example.sort_digits:SortDigitsOptions",
            summary="Write a number's digits in ascending order.",
        )
    ]


@hookimpl
def areal_engines() -> list[Component]:
    return [
        Component(
            name="delayed",
            factory="areal_example.delayed:DelayedEngine",
            options="areal_example.delayed:DelayedEngineOptions",
            summary="Another engine, slower and counted: to see what a slow engine does to a run.",
            # What the wrapped engine needs; a real engine names its library here, and the command that brings it.
            requires=("torch",),
            install="pip install areal-core",
        )
    ]
