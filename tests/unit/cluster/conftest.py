"""What the tests of a module share: one Ray cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from ray_site import Site

from areal.cluster.ray import RayCluster, RayOptions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_AUTH_TOKEN", "f" * 64)  # set before ours, so that ours does not stay behind
        made = Site(RayCluster(RayOptions(), str(run_dir)), run_dir)
        await made.cluster.start()
        yield made
        await made.close()
