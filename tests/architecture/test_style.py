"""What every file keeps to: invariants are stated, names mean something, nothing leads to one machine."""

from __future__ import annotations

import ast
import re

from figures import ROOT, SOURCE, python_files, relative, repository_files, tree

NO_INVARIANT_NEEDED = ("Exception", "Error", "Enum", "StrEnum", "IntEnum", "TypedDict", "NamedTuple", "Conformance")
"""Ends of the names of base classes whose subclasses say something else: what went wrong, or what is tested."""
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
FACES = {"areal/utils"}
"""A folder that only passes on names which users were promised; no code lives in it."""
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".txt", ".sh", ""}
# In pieces, so that this file does not name what it forbids.
PLACES = [f"/{folder}/" for folder in ("tmp", "work", "root", "home", "opt")]
HOSTS = ["pypi" + ".org", "python" + "hosted.org", "registry." + "npmjs", "deb." + "debian.org", "pytorch" + ".org/whl"]
MACHINES = re.compile("|".join([*(rf"(?<![\w.}}\])]){place}" for place in PLACES), *map(re.escape, HOSTS)]))


def _families(node: ast.ClassDef, bases_of: dict[str, list[str]]) -> set[str]:
    """Return the names of all ancestors that core itself defines or names."""
    found: set[str] = set()
    waiting = [node.name, *bases_of.get(node.name, [])]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += bases_of.get(name, [])
    return found


def test_every_class_names_its_invariant() -> None:
    nodes = [
        (path, node)
        for path in python_files()
        if ROOT / "packages" in path.parents
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    bases_of = {node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases] for _, node in nodes}
    wrong = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path, node in nodes
        if not any(family.endswith(NO_INVARIANT_NEEDED) for family in _families(node, bases_of))
        and "Invariant:" not in (ast.get_docstring(node) or "")
    ]
    assert not wrong, "say which one thing never breaks (Invariant: ...):\n" + "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [relative(path) for path in python_files() if SOURCE in path.parents and not ast.get_docstring(tree(path))]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_called_utils() -> None:
    wrong = {
        part
        for path in repository_files()
        for part in [*path.parents, path]
        if part.stem in NAMELESS and not any(part.as_posix().endswith(face) for face in FACES)
    }
    assert not wrong, f"a function lives with its only caller, or in a module named after what it does: {wrong}"


def test_no_file_leads_to_one_machine() -> None:
    wrong = [
        f"{relative(path)}:{number} {line.strip()[:100]}"
        for path in repository_files()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINES.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reader_of_machines_knows_one_when_it_sees_it() -> None:
    found = [place for place in PLACES if MACHINES.search(f'open("{place}x")')]
    assert found == PLACES
    assert all(MACHINES.search(f"see https://{host}/simple") for host in HOSTS)
    assert not MACHINES.search("{run}/work/x") and not MACHINES.search("src/home/x")
