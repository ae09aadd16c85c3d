"""What holds for every test, before any heavy library is imported."""

import os
import site
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings
from ray_nodes import Nodes

# The user's own settings must not decide what is tested.
for name in ("AREAL_BLOCK", "AREAL_DEBUG_MODE", "AREAL_HOME"):
    os.environ.pop(name, None)

# A property is true or false, however busy the machine is; pytest's own limit ends what hangs.
settings.register_profile("areal", deadline=None)
settings.load_profile("areal")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A model or data set that is not on disk is an error at once, not a wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Ray reads it when it is imported; with it, clusters of several nodes can be joined.
os.environ.setdefault("RAY_AUTH_MODE", "token")


COMPANIONS = ("areal-vllm", "areal-sglang", "areal-fsdp2", "areal-ascend")


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of another environment, in a folder with a space, that has all that this one has."""
    folder = tmp_path_factory.mktemp("another environment") / "env"
    venv.create(folder, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("src"))]
    (folder / "lib" / version / "site-packages" / "ours.pth").write_text("\n".join(ours) + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Nodes]:
    """A Ray cluster of several nodes on this machine, without any yet."""
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture
def only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide AReaL's own plugins, of which an environment may have any, from what is discovered."""
    entry_points = metadata.entry_points

    def without_plugins(**wanted: str) -> list[metadata.EntryPoint]:
        found = entry_points(**wanted)
        return [point for point in found if point.dist is None or point.dist.name not in COMPANIONS]

    monkeypatch.setattr(metadata, "entry_points", without_plugins)
