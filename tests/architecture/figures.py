"""How big things are: the measurements behind test_sizes.py; `python tests/architecture/figures.py` prints them."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "packages" / "areal-core" / "src" / "areal"
MAX_FILE_LINES = 400

_FOLDERS = ("packages", "tests", "examples", "benchmarks", "recipes", "docs", ".ci")
_NOT_OURS = ("__pycache__", "build", "dist", "runs")


@dataclass(frozen=True)
class Sized:
    """Something with a size. Invariant: `where` is enough to find it."""

    where: str
    size: int


def repository_files() -> list[Path]:
    """Return every file of the repository that a person wrote."""
    found = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    for folder in _FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(path for path in found if not any(_is_made(part) for part in path.relative_to(ROOT).parts[:-1]))


def _is_made(folder: str) -> bool:
    return folder in _NOT_OURS or folder.endswith(".egg-info") or (folder.startswith(".") and folder not in _FOLDERS)


def python_files() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".py"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> Iterator[Sized]:
    """Yield each function with the lines of its body; signature and docstring are not counted."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield Sized(f"{relative(path)}:{node.lineno} {node.name}", lines)


def classes(path: Path) -> Iterator[Sized]:
    """Yield each class with the number of its methods; test cases are not counted."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            methods = [method for method in methods_of(node) if not method.startswith("test_")]
            yield Sized(f"{relative(path)}:{node.lineno} {node.name}", len(methods))


def methods_of(node: ast.ClassDef) -> list[str]:
    return [child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]


def own_fields(table: type[Any]) -> list[str]:
    """Return the keys that a recipe's table (a pydantic model or a dataclass) declares itself."""
    if dataclasses.is_dataclass(table):
        return [field.name for field in dataclasses.fields(table)]
    return [name for name in table.model_fields if name in table.__annotations__]


def tables(root: type[Any]) -> list[type[Any]]:
    """Return the nested tables of a recipe's table, itself first, each once."""
    found = [root]
    for table in found:  # grows while it is walked
        found += (inner for hint in _hints(table).values() for inner in _tables_in(hint) if inner not in found)
    return found


def leaves(table: type[Any], path: str = "") -> list[str]:
    """Return every key of a recipe that holds a value and not another table, as dotted paths; ``*`` is any index."""
    found: list[str] = []
    for name, hint in _hints(table).items():
        inner = _tables_in(hint)
        here = f"{path}{name}"
        if not inner:
            found.append(here)
        for nested in inner:
            found += leaves(nested, f"{here}.*." if _is_list(hint) else f"{here}.")
    return found


def _hints(table: type[Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(table)] if dataclasses.is_dataclass(table) else None
    hints = typing.get_type_hints(table)
    return {name: hints[name] for name in names or table.model_fields}


def _tables_in(hint: Any) -> list[type[Any]]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return [hint] if issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint) else []
    return [table for argument in typing.get_args(hint) for table in _tables_in(argument)]


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) in (list, tuple)


def main() -> None:
    from areal.config.schema import RunConfig

    core = [path for path in python_files() if SOURCE in path.parents]
    lines = {path: num_lines(path) for path in core}
    big = sum(size for size in lines.values() if size > MAX_FILE_LINES)
    longest_file = max(core, key=lambda path: lines[path])
    longest = max((sized for path in core for sized in functions(path)), key=lambda sized: sized.size)
    fullest = max((sized for path in core for sized in classes(path)), key=lambda sized: sized.size)
    for name, value in (
        ("files of areal-core", f"{len(core)} with {sum(lines.values())} lines"),
        (f"share of lines in files over {MAX_FILE_LINES} lines", f"{big / sum(lines.values()):.0%}"),
        ("longest file", f"{lines[longest_file]} lines, {relative(longest_file)}"),
        ("longest function body", f"{longest.size} lines, {longest.where}"),
        ("class with most methods", f"{fullest.size}, {fullest.where}"),
        ("configuration leaves", str(len(leaves(RunConfig)))),
    ):
        print(f"{name:44} {value}")


def list_benchmarks() -> None:
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        summary = (ast.get_docstring(tree(path)) or "").partition("\n")[0]
        print(f"{path.stem:24} {summary}")


if __name__ == "__main__":
    list_benchmarks() if "--benchmarks" in sys.argv else main()
