"""Staged weights on their way to vLLM's ranks: by reference to the one in this process, by a file in memory to many."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from areal.contracts.messages import Version
from areal.errors import TransferFailed

_MEMORY = Path("/dev/shm")


class Handover:
    """Invariant: holds one whole version, or nothing; its file exists exactly as long."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self._name = name
        self._num_ranks = num_ranks
        self._version: Version | None = None
        self._weights: dict[str, Tensor] = {}
        self._path: Path | None = None

    def keep(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Keep a version in this process, in place of the one before."""
        self.drop()
        self._weights, self._version = dict(weights), version

    def put(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Keep a version in a file, in place of the one before. TransferFailed when there is no room for it."""
        self.drop()
        self._path, self._version = self._write(weights), version

    def take(self, version: Version) -> dict[str, Any]:
        """Return the update for vLLM's ranks, which must be done with it before `drop`; TransferFailed."""
        if version != self._version:
            there = "nothing" if self._version is None else f"version {self._version}"
            raise TransferFailed(f"engine {self._name!r} cannot commit version {version}: {there} is staged")
        return {"path": str(self._path)} if self._path else {"tensors": self._weights}

    def drop(self) -> None:
        """Forget what is kept."""
        path, self._path = self._path, None
        self._weights, self._version = {}, None
        if path is not None:
            path.unlink(missing_ok=True)

    def _write(self, weights: Mapping[str, Tensor]) -> Path:
        folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(dir=folder, prefix="areal-vllm-", suffix=".safetensors", delete=False) as file:
            path = Path(file.name)
        try:
            save_file(dict(weights), path)
        except Exception as error:
            path.unlink(missing_ok=True)
            raise TransferFailed(
                f"engine {self._name!r} could not hand the weights to its {self._num_ranks} ranks through {folder}: "
                f"{error}; make room there"
            ) from error
        return path
