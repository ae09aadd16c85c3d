"""``python -m areal.launcher.local``: a user's script with a resolved recipe, or one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from areal.errors import ConfigError
from areal.launcher.local import launch, main

SCRIPT = """
import beside
from areal.errors import WorkerFailed

def main(config):
    print(beside.GREETING, config.seed, config.training.max_steps)
    if config.seed == 13:
        raise WorkerFailed("the engine did not start")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("GREETING = 'hello'")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_script_gets_the_recipe_with_its_overrides(script: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 7\ntraining: {max_steps: 12}\nenvironments: [{type: reverse_digits}]\n")
    result = run(script, "--config", recipe, "seed=8")
    assert (result.output, result.exit_code) == ("hello 8 12\n", 0)
    assert run(script, "seed=3").output.startswith("hello 3 "), "without a recipe: the bundled one"


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "areal.launcher.local", "no.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: the script 'no.py' does not")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seed=13"], "error: the engine did not start\n"),
        (["--config", "nowhere.yaml"], "error: "),
        (["sead=1"], "error: "),
    ],
)
def test_mistakes_are_one_line(script: Path, arguments: list[str], said: str) -> None:
    result = run(script, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_script_that_is_not_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    broken = tmp_path / "broken.py"
    broken.write_text("import os\ndef main(config:\n")
    with pytest.raises(ConfigError, match=r"broken\.py:2 is not Python: ") as caught:
        launch(str(broken), None, ())
    assert "\n" not in str(caught.value)


def test_scripts_that_cannot_be_run(script: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the script 'no\.py' does not exist; give the path of a Python file"):
        launch("no.py", None, ())
    with pytest.raises(ConfigError, match="does not exist"):
        launch(str(tmp_path), None, ())
    script.write_text("x = 1\nmain = 3\n")
    with pytest.raises(ConfigError, match=r"train\.py defines no function main\(config\), which the launcher calls"):
        launch(str(script), None, ())
