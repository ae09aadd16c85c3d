"""The smallest resharder: a folder of safetensors files, for tests of engines and backends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal.contracts.component import Component
from areal.contracts.messages import Version
from areal.contracts.options import Options
from areal.contracts.transfer import Layout, Plan, Receipt, checksum
from areal.errors import TransferFailed

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S = 0.01


class FolderOptions(Options):
    """Invariant: sender and receivers see the same folder."""

    folder: str


FOLDER_RESHARDER = Component(
    name="test_folder",
    factory="areal.testing.transfer:FolderResharder",
    options="areal.testing.transfer:FolderOptions",
    summary="Weights through a folder of safetensors files; for tests.",
)


class FolderResharder:
    """Invariant: a version's file appears at once and whole, or never."""

    def __init__(self, options: FolderOptions, run_dir: str) -> None:
        self._options = options

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        return Plan(
            uid=f"{self._options.folder}/{len(targets)}",
            source=source,
            targets=tuple(targets),
            details={"folder": self._options.folder},
        )

    def sender(self, plan: Plan, rank: int = 0) -> FolderSender:
        return FolderSender(plan)

    def receiver(self, plan: Plan, member: int) -> FolderReceiver:
        return FolderReceiver(plan)


class FolderSender:
    """Invariant: writes exactly what it is given, so that a test can send what a receiver must refuse."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def send(self, version: Version, tensors: Iterable[tuple[str, Tensor]], deadline_s: float) -> Receipt:
        """Write the tensors as they are: the caller has cast them."""
        from safetensors.torch import save_file

        sent: Mapping[str, Tensor] = {name: tensor.detach().contiguous() for name, tensor in tensors}
        path = _path(self._plan, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(sent), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        return Receipt(version=version, checksums={name: checksum(tensor) for name, tensor in sent.items()})

    def close(self) -> None: ...


class FolderReceiver:
    """Invariant: waits for the version's file no longer than the deadline."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def receive(self, version: Version, deadline_s: float) -> Iterator[tuple[str, Tensor]]:
        """Yield the file's tensors; TransferFailed when it does not appear in time."""
        from safetensors import safe_open

        path = _path(self._plan, version)
        end = time.monotonic() + deadline_s
        while not path.exists():
            if time.monotonic() > end:
                raise TransferFailed(f"the sender wrote no {path.name} within {deadline_s:.3g} s")
            time.sleep(_POLL_S)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)

    def close(self) -> None: ...


def _path(plan: Plan, version: Version) -> Path:
    return Path(plan.details["folder"]) / f"version-{version}.safetensors"
