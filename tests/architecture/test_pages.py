"""README, ARCHITECTURE and the entry points say what is so."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from figures import ROOT, SOURCE, relative, repository_files

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "packages/areal-core/pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = [path for path in repository_files() if path.suffix == ".md"]
MAX_DEPENDENCIES = 10
IMPORTED_AS = {"pyyaml": "yaml", "rich-click": "rich_click", "tensorboard": "torch.utils.tensorboard"}


def _section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower()


def test_the_tree_names_every_package_folder() -> None:
    drawn = set(re.findall(r"^ +([\w/]+)/ ", _section(ARCHITECTURE, "The tree"), re.MULTILINE))
    there = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*/__init__.py")}
    assert drawn == there


def test_paths_on_the_architecture_page_exist() -> None:
    inside = re.findall(r"(?<![\w./-])((?:app|flow|cluster|config|cli|tests|docs)/[\w./-]+\.(?:py|md))", ARCHITECTURE)
    assert len(inside) > 10
    missing = {path for path in inside if not (SOURCE / path).exists() and not (ROOT / path).exists()}
    assert not missing


def test_hard_dependencies_are_few_explained_and_used() -> None:
    asked = [_name(requirement) for requirement in PROJECT["dependencies"]]
    explained = re.findall(r"^\| ([\w-]+) \|", _section(ARCHITECTURE, "Dependencies"), re.MULTILINE)
    assert explained[1:] == sorted(asked)  # after the table's head
    assert len(asked) <= MAX_DEPENDENCIES
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    used = {name: IMPORTED_AS.get(name, name) for name in asked}
    unused = [name for name, module in used.items() if not re.search(rf"^\s*(from|import) {module}\b", code, re.M)]
    assert not unused


def test_constraints_name_every_requirement() -> None:
    pinned = {
        _name(line)
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    extras = [
        requirement
        for name, wanted in PROJECT["optional-dependencies"].items()
        if name != "wandb"
        for requirement in wanted
    ]
    asked = {_name(requirement) for requirement in [*PROJECT["dependencies"], *extras]}
    assert asked <= pinned


def test_every_decision_is_listed() -> None:
    pages = {relative(path) for path in (ROOT / "docs/adr").glob("*.md")}
    assert pages == set(re.findall(r"\]\((docs/adr/[\w.-]+)\)", ARCHITECTURE))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_block_is_a_recipe(tmp_path: Path) -> None:
    from areal.config import load_recipe

    (block,) = re.findall(r"^```yaml\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    recipe = tmp_path / "readme.yaml"
    recipe.write_text(block, encoding="utf-8")
    config = load_recipe(str(recipe))
    assert [environment.weight for environment in config.environments] == [0.6, 0.4]
    assert config.training.learning_rate == 1e-5


def test_the_readme_lists_every_command() -> None:
    from areal.cli.main import COMMANDS

    assert set(re.findall(r"^\| `areal ([a-z]+)", README, re.MULTILINE)) == set(COMMANDS)


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"(?<![\w./])((?:recipes|examples|docs)/[\w./-]+\.(?:yaml|py|md))", README)
    assert len(named) > 3
    assert all((ROOT / path).exists() for path in named)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = _section(README, "Two commands")
    assert "\nmake run\nmake test\n" in commands
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "make test" in script
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], timeout=30).returncode == 0


@pytest.mark.parametrize("target", ["run", "test", "check", "bench", "docs", "figures"])
def test_make_knows_its_targets(target: str, tmp_path: Path) -> None:
    planned = subprocess.run(
        ["make", "--dry-run", target, f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert planned.returncode == 0, planned.stderr
    assert "-m venv" in planned.stdout and "install -c constraints.txt" in planned.stdout
