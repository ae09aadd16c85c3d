"""What `areal doctor` reports: one thing looked at, what its absence costs and the command that brings it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "low", "absent", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. Invariant: unless `state` is ok, `detail` says what that costs."""

    topic: str
    """Heading under which it stands; a plugin takes its own name."""
    name: str
    state: State
    detail: str
    command: str = ""
    """Brings what is missing."""
    is_required: bool = False
    """Whether no run at all is possible while it is absent or broken."""
