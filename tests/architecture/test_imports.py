"""The arrows of ARCHITECTURE.md: who may import whom, and where a heavy library may be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from figures import ROOT, SOURCE, python_files, relative, tree

HEAVY = {"torch", "transformers", "ray", "vllm", "sglang", "torch_npu"}
HEAVY_ROOMS = ("algorithms", "builtins", "cluster/ray")
LIGHT_DOORS = ("builtins/__init__.py", "builtins/hooks.py", "algorithms/__init__.py")
"""Files of the heavy rooms that listing components imports."""
NEVER_HEAVY = ("contracts", "config", "cli", "hookspecs.py", "plugins.py", "env.py", "errors.py")
"""Not even inside a function: what stands here must work where no heavy library is installed."""
PLUGINS_MAY_USE = {"areal", "areal.contracts", "areal.algorithms", "areal.testing", "areal.errors"}
PLUGIN_FOLDERS = [
    path.parent
    for folder in ("packages", "examples")
    for path in sorted((ROOT / folder).glob("*/pyproject.toml"))
    if path.parent.name != "areal-core"
]


def imported(nodes: list[ast.stmt], *, inside_functions: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of what runs when these statements run; imports for annotations only are left out."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name) for name in _from(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse, inside_functions=inside_functions)
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(_statements(node), inside_functions=inside_functions)


def _statements(node: ast.AST) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        found += [child] if isinstance(child, ast.stmt) else _statements(child)
    return found


def _from(node: ast.ImportFrom) -> list[str]:
    module = node.module or ""
    if module == "areal":
        return [_root_or_submodule(alias.name) for alias in node.names]
    return [module]


def _root_or_submodule(name: str) -> str:
    is_module = (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()
    return f"areal.{name}" if is_module else "areal"


def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    inside = path.relative_to(SOURCE).as_posix()
    return any(inside == place or inside.startswith(f"{place}/") for place in places)


def _heavy(path: Path, *, inside_functions: bool) -> list[str]:
    return [
        f"{relative(path)}:{line} imports {name}"
        for line, name in imported(tree(path).body, inside_functions=inside_functions)
        if name.partition(".")[0] in HEAVY
    ]


def _core_files() -> list[Path]:
    return [path for path in python_files() if SOURCE in path.parents]


def test_import_linter_keeps_the_arrows() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_heavy_libraries_stand_at_the_top_of_a_module_only_in_heavy_rooms() -> None:
    outside = [path for path in _core_files() if not _is_in(path, HEAVY_ROOMS) or _is_in(path, LIGHT_DOORS)]
    wrong = [found for path in outside for found in _heavy(path, inside_functions=False)]
    assert not wrong, "import it inside the function that needs it:\n" + "\n".join(wrong)


def test_what_must_work_everywhere_imports_no_heavy_library_at_all() -> None:
    wrong = [
        found for path in _core_files() if _is_in(path, NEVER_HEAVY) for found in _heavy(path, inside_functions=True)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("plugin", PLUGIN_FOLDERS, ids=relative)
def test_a_plugin_uses_the_public_doors_only(plugin: Path) -> None:
    own_tests = plugin / "tests"
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in python_files()
        if plugin in path.parents and own_tests not in path.parents
        for line, name in imported(tree(path).body, inside_functions=True)
        if name.partition(".")[0] == "areal" and ".".join(name.split(".")[:2]) not in PLUGINS_MAY_USE
    ]
    assert not wrong, "if a plugin needs more than the public doors, a hook is missing:\n" + "\n".join(wrong)


def test_the_reader_of_imports_sees_what_runs_and_skips_annotations() -> None:
    code = """
import os
if TYPE_CHECKING:
    import torch
try:
    import ray
except ImportError:
    import vllm.engine
class Here:
    from transformers import AutoModel
def later():
    import sglang
from areal import env, Component
"""
    module = ast.parse(code)
    at_top = {name for _, name in imported(module.body, inside_functions=False)}
    assert at_top == {"os", "ray", "vllm.engine", "transformers", "areal.env", "areal"}
    everywhere = {name for _, name in imported(module.body, inside_functions=True)}
    assert everywhere == at_top | {"sglang"}
