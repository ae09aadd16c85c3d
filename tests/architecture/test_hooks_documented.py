"""docs/hooks.md and the hookspecs say the same: names, arguments, kind and meaning."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pluggy
import pytest

from areal import hookspecs
from areal.plugins import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
HEADING = re.compile(r"^## (areal_\w+)\((.*)\)$", re.MULTILINE)


def specs() -> dict[str, pluggy.HookCaller]:
    manager = pluggy.PluginManager("areal")
    manager.add_hookspecs(hookspecs)
    return {name: caller for name, caller in vars(manager.hook).items() if name.startswith("areal_")}


def section(name: str) -> str:
    return PAGE.split(f"## {name}(")[1].split("\n## ")[0]


SPECS = specs()


def test_the_page_lists_exactly_the_hooks() -> None:
    listed = {name: tuple(filter(None, arguments.split(", "))) for name, arguments in HEADING.findall(PAGE)}
    assert listed == {name: tuple(caller.spec.argnames) for name, caller in SPECS.items() if caller.spec}


def test_the_page_keeps_the_order_of_the_specs() -> None:
    in_file = [name for name in vars(hookspecs) if name.startswith("areal_")]
    assert [name for name, _ in HEADING.findall(PAGE)] == in_file


@pytest.mark.parametrize("name", SPECS)
def test_signature_and_meaning_stand_in_the_section(name: str) -> None:
    function = getattr(hookspecs, name)
    signature = str(inspect.signature(function)).replace("'", "")
    text = section(name)
    assert f"def {name}{signature}\n" in text
    assert " ".join(inspect.getdoc(function).split()) in " ".join(text.split())


@pytest.mark.parametrize("name", SPECS)
def test_the_kind_is_the_specs(name: str) -> None:
    spec = SPECS[name].spec
    assert spec is not None
    returns = str(inspect.signature(getattr(hookspecs, name)).return_annotation)
    assert (name in KINDS.values()) == (returns == "Iterable[Component]")
    kind = "question" if spec.opts["firstresult"] else "offer" if "Iterable" in returns else "announcement"
    assert f"- Kind: {kind}" in section(name)


@pytest.mark.parametrize("name", SPECS)
def test_the_example_compiles_and_implements_the_hook(name: str) -> None:
    example = re.findall(r"```python\n(@hookimpl.*?)```", section(name), re.DOTALL)
    assert len(example) == 1
    code = compile("from __future__ import annotations\n" + example[0], "docs/hooks.md", "exec")
    assert [constant.co_name for constant in code.co_consts if inspect.iscode(constant)] == [name]
