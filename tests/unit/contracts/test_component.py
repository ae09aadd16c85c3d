"""Components: named without importing, loaded with one sentence when they cannot be."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from areal.contracts.component import API, Component, import_object
from areal.contracts.options import Options
from areal.errors import MissingLibrary, PluginError


class Choices(Options):
    size: int = 3


def component(**more: object) -> Component:
    return Component(name="own", factory=f"{__name__}:Choices", **more)  # type: ignore[arg-type]


def test_a_component_pickles_and_compares() -> None:
    made = component(requires=("torch",), capabilities=frozenset({"lora"}), summary="mine")
    assert pickle.loads(pickle.dumps(made)) == made != component()
    assert hash(made) and made.api == API


def test_what_is_missing_is_found_without_importing() -> None:
    code = (
        "import sys; from areal.contracts.component import Component;"
        "c = Component(name='x', factory='a:B', requires=('torch', 'json', 'no_such', 'no_such.sub', '', 'json.no'));"
        "print(c.missing(), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "('no_such', 'no_such.sub', '', 'json.no') False\n"


def test_a_missing_library_names_the_command_that_helps() -> None:
    wanting = component(requires=("no_such", "json", "nor_this"), install="pip install it")
    with pytest.raises(
        MissingLibrary,
        match=r"^'own' needs no_such, nor_this, which is not installed; install it with: pip install it$",
    ):
        wanting.load()
    with pytest.raises(MissingLibrary, match=r"which is not installed$"):
        component(requires=("no_such",)).check_installed()


def test_loading() -> None:
    assert component(requires=("json",)).load() is Choices
    assert import_object("math:pi") > 3


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("math", "'math' is not of the form 'package.module:Name'"),
        (":pi", "':pi' is not of the form"),
        ("math:", "'math:' is not of the form"),
        ("no_such_module:X", "cannot import 'no_such_module' for 'no_such_module:X': No module named 'no_such_module'"),
        ("math:tau_squared", "module 'math' has no 'tau_squared'"),
    ],
)
def test_paths_that_lead_nowhere(path: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        import_object(path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library", "cannot import 'broken_plugin' for 'broken_plugin:X': No module named 'no_such"),
        (
            "raise OSError('no driver')",
            "'broken_plugin' failed while it was imported for 'broken_plugin:X': OSError",
        ),
        ("def f(:", "'broken_plugin' failed while it was imported for 'broken_plugin:X': SyntaxError: "),
    ],
)
def test_modules_that_break_while_imported(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=said):
        import_object("broken_plugin:X")


def test_options() -> None:
    chosen = component(options=f"{__name__}:Choices").parse_options({"size": 5})
    assert isinstance(chosen, Choices) and chosen.size == 5
    assert type(component().parse_options({})) is Options
    for table in ({"sizes": 5}, {"size": "large"}):
        with pytest.raises(ValidationError):
            component(options=f"{__name__}:Choices").parse_options(table)
    with pytest.raises(ValidationError):
        component().parse_options({"size": 5})
