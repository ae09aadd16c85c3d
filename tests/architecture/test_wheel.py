"""What `pip install ./packages/areal-core` installs: everything below src/areal, and the command."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from figures import ROOT, SOURCE


def test_the_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    built = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT / "packages/areal-core")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("areal_core-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("areal/")}
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        declared = archive.read(entry_points).decode()
    wanted = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted
    assert {"areal/recipes/default.yaml", "areal/py.typed"} <= packed
    assert "areal = areal.cli.main:main" in declared and "builtin = areal.builtins.hooks" in declared
