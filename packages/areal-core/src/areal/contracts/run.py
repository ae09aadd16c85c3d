"""What a plugin is told about the run it watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Invariant: `folder` exists and holds the resolved configuration before anybody sees this."""

    name: str
    folder: str
    config: Mapping[str, Any]
    """The resolved recipe as plain values."""
    start_step: int
    """Training steps already done by the checkpoint this run goes on from; 0 for a new run."""
