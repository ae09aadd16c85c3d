"""Staged weights on their way to vLLM's ranks: by reference to the one in this process, by a file in memory to many.

The file has no name (memfd_create(2)): whatever becomes of this process, nothing of it stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areal.contracts.messages import Version
from areal.errors import TransferFailed


class Handover:
    """Invariant: holds one whole version, or nothing; its file exists exactly as long."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self._name = name
        self._num_ranks = num_ranks
        self._version: Version | None = None
        self._weights: dict[str, Tensor] = {}
        self._file: int | None = None

    def keep(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Keep a version in this process, in place of the one before."""
        self.drop()
        self._weights, self._version = dict(weights), version

    def put(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """Keep a version in a file, in place of the one before. TransferFailed when there is no room for it."""
        self.drop()
        self._file, self._version = self._write(weights), version

    def take(self, version: Version) -> dict[str, Any]:
        """Return the update for vLLM's ranks, which must be done with it before `drop`; TransferFailed."""
        if version != self._version:
            there = "nothing" if self._version is None else f"version {self._version}"
            raise TransferFailed(f"engine {self._name!r} cannot commit version {version}: {there} is staged")
        return {"tensors": self._weights} if self._file is None else {"path": f"/proc/{os.getpid()}/fd/{self._file}"}

    def drop(self) -> None:
        """Forget what is kept."""
        file, self._file = self._file, None
        self._weights, self._version = {}, None
        if file is not None:
            os.close(file)

    def _write(self, weights: Mapping[str, Tensor]) -> int:
        file = os.memfd_create(f"areal-{self._name}-weights")
        try:
            with os.fdopen(os.dup(file), "wb") as stream:
                torch.save(dict(weights), stream)
        except Exception as error:
            os.close(file)
            raise TransferFailed(
                f"engine {self._name!r} could not hand the weights to its {self._num_ranks} ranks in memory: {error}"
            ) from error
        return file
