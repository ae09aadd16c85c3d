"""Every component that core offers leads to a class, and its options to an options class."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal.builtins import hooks
from areal.contracts.component import Component, import_object
from areal.contracts.options import Options
from areal.plugins import KINDS, discover

OFFERED = [
    pytest.param(offer.kind, offer.component, id=f"{offer.kind}-{offer.component.name}")
    for kind in KINDS
    for same_name in discover().offers(kind).values()
    for offer in same_name
    if offer.distribution.startswith("areal-core ")
]
PARAMETERS = {
    "engine": 2,
    "backend": 2,
    "resharder": 2,
    "accelerator": 1,
    "environment": 2,
    "algorithm": 1,
    "tracker": 2,
    "cluster": 2,
}
"""How many arguments each kind's factory gets; the contracts' docstrings name them."""


@pytest.mark.parametrize(("kind", "component"), OFFERED)
def test_the_factory_is_there_and_takes_its_arguments(kind: str, component: Component) -> None:
    if component.missing():
        # Without its library a module cannot be imported, but it can be read.
        assert component.factory.partition(":")[2] in classes_of(component.factory)
        return
    factory = component.load()
    inspect.signature(factory).bind(*[None] * PARAMETERS[kind])


@pytest.mark.parametrize(("kind", "component"), OFFERED)
def test_the_options_have_an_owner_and_good_defaults(kind: str, component: Component) -> None:
    if component.options is None:
        return
    if component.missing():
        assert component.options.partition(":")[2] in classes_of(component.options)
        return
    options = import_object(component.options)
    assert issubclass(options, Options)
    needs_no_table = not any(field.is_required() for field in options.model_fields.values())
    # A recipe that only names a component must be enough, but for a task that is many tasks.
    assert needs_no_table or component.name == "reasoning_gym"


@pytest.mark.parametrize(("kind", "component"), OFFERED)
def test_what_can_be_missing_has_a_command(kind: str, component: Component) -> None:
    assert bool(component.requires) == bool(component.install)


def test_what_the_design_promises_is_offered() -> None:
    offered = {(param.values[0], param.values[1].name) for param in OFFERED}
    assert offered >= {
        ("engine", "transformers"),
        ("backend", "torch"),
        ("resharder", "disk"),
        ("resharder", "xccl"),
        ("accelerator", "cpu"),
        ("accelerator", "cuda"),
        ("environment", "reverse_digits"),
        ("algorithm", "grpo"),
        ("tracker", "jsonl"),
        ("cluster", "inline"),
        ("cluster", "ray"),
    }


@pytest.mark.parametrize("is_there", [True, False])
def test_cuda_is_asked_for_only_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    asked = []

    class Cuda:
        def __init__(self, options: object) -> None:
            asked.append(options)

        def is_available(self) -> bool:
            return True

    monkeypatch.setattr(Path, "exists", lambda path: is_there and str(path) == "/dev/nvidiactl")
    monkeypatch.setattr(Component, "load", lambda component: Cuda)
    assert hooks.areal_detect_accelerator() == ("cuda" if is_there else "cpu")
    assert len(asked) == is_there


def classes_of(path: str) -> set[str]:
    spec = find_spec(path.partition(":")[0])
    assert spec is not None and spec.origin is not None
    return {node.name for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)}
