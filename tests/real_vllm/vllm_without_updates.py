"""A vLLM whose own weight transfer methods are taken out: the patch must bring them, and updates must work with them.

A process of its own, because other tests need them. Prints ``updated by the patch`` when all is well.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from areal.testing.engine_fixtures import long_requests
from areal_vllm import environment, patch

environment.prepare("cpu", compiles=False)

from vllm.v1.worker.gpu_worker import Worker  # noqa: E402 - after the environment
from vllm_stands import vllm_stand  # noqa: E402

ADDED = [row for row in patch.PATCHES if row.kind == "add"]


def main() -> None:
    for row in ADDED:
        delattr(Worker, row.name.rpartition(".")[2])
    for tied in (True, False):
        with vllm_stand(Path(tempfile.mkdtemp()), tied=tied, check_loaded="always") as stand:
            assert {row.state() for row in ADDED} == {"applied"}
            assert stand.engine._stepper.engine.vllm_config.weight_transfer_config is None  # pyright: ignore
            for _ in range(3):
                stand.run(stand.update(stand.new_version()))
                stand.check(stand.generate(long_requests(stand, 4, max_new_tokens=10)))
    sys.stdout.write("updated by the patch\n")


if __name__ == "__main__":
    main()
