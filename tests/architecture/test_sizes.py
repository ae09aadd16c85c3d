"""The size budgets of ARCHITECTURE.md; figures.py measures."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from figures import (
    MAX_FILE_LINES,
    ROOT,
    SOURCE,
    Sized,
    classes,
    functions,
    leaves,
    methods_of,
    num_lines,
    own_fields,
    python_files,
    relative,
    tables,
    tree,
)

from areal.config.schema import RunConfig

MAX_FUNCTION_LINES = 50
MAX_METHODS = 20
MAX_REQUIRED_METHODS = 6
MAX_OWN_FIELDS = 15
MAX_LEAVES = 120
MAX_RECIPE_LINES = 20

CONTRACTS = ("Engine", "Backend", "Resharder", "Accelerator", "Environment", "Algorithm", "Cluster", "Tracker")
PAIRS = {"load": "save"}
"""One ability with two ends counts once."""
RECIPES = [*sorted((ROOT / "recipes").glob("*.yaml")), *sorted((SOURCE / "recipes").glob("*.yaml"))]


def _too_big(things: list[Sized], limit: int) -> str:
    return "\n".join(f"{thing.where}: {thing.size}, at most {limit}" for thing in things if thing.size > limit)


def test_files_are_short() -> None:
    files = [Sized(relative(path), num_lines(path)) for path in python_files()]
    assert not (wrong := _too_big(files, MAX_FILE_LINES)), wrong


def test_functions_are_short() -> None:
    everything = [function for path in python_files() for function in functions(path)]
    assert not (wrong := _too_big(everything, MAX_FUNCTION_LINES)), wrong


def test_classes_have_few_methods() -> None:
    everything = [sized for path in python_files() for sized in classes(path)]
    assert not (wrong := _too_big(everything, MAX_METHODS)), wrong


def test_contracts_ask_for_few_methods() -> None:
    asked = {
        node.name: [method for method in methods_of(node) if PAIRS.get(method) not in methods_of(node)]
        for path in (SOURCE / "contracts").glob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
    }
    assert set(CONTRACTS) <= set(asked)
    sizes = [Sized(name, len(methods)) for name, methods in asked.items()]
    assert not (wrong := _too_big(sizes, MAX_REQUIRED_METHODS)), wrong


def _options_classes() -> dict[str, list[str]]:
    """Return the own fields of every class below areal.contracts.options.Options, found by its bases' names."""
    nodes = [
        (path, node)
        for path in python_files()
        if SOURCE.parent.parent.parent in path.parents
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    known = {"Options"}
    while newly := {node.name for _, node in nodes if known & {ast.unparse(base) for base in node.bases}} - known:
        known |= newly
    return {
        f"{relative(path)} {node.name}": [
            ast.unparse(field.target)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation)
        ]
        for path, node in nodes
        if node.name in known
    }


def test_options_classes_have_few_fields() -> None:
    found = _options_classes()
    assert len(found) > 3
    sizes = [Sized(name, len(fields)) for name, fields in found.items()]
    assert not (wrong := _too_big(sizes, MAX_OWN_FIELDS)), wrong


@pytest.mark.parametrize("table", tables(RunConfig)[1:], ids=lambda table: table.__name__)
def test_tables_of_a_recipe_have_few_keys(table: type[Any]) -> None:
    assert len(own_fields(table)) <= MAX_OWN_FIELDS


def test_the_whole_configuration_is_small() -> None:
    keys = leaves(RunConfig)
    assert {"seed", "training.amp.dtype", "environments.*.weight", "resources.infer.num_gpus"} <= set(keys)
    assert len(keys) == len(set(keys)) <= MAX_LEAVES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_that_newcomers_meet_are_short(recipe: Path) -> None:
    assert num_lines(recipe) <= MAX_RECIPE_LINES
