"""How the controller itself is: how late its event loop is, and how much memory it holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

EVERY_S = 0.25
_STATM = Path("/proc/self/statm")


class Vitals:
    """Invariant: `collect` tells of the time since the last `collect`, and no measurement twice."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def measure_forever(self) -> None:
        """Sleep and see how much later than asked the loop comes back: so late is everything else as well."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._lags.append(max(0.0, loop.time() - due))

    def collect(self) -> Mapping[str, float]:
        """Return ``controller/lag_mean_s``, ``controller/lag_max_s`` and ``controller/memory_mb``."""
        lags, self._lags = self._lags or [0.0], []
        return {
            "controller/lag_mean_s": sum(lags) / len(lags),
            "controller/lag_max_s": max(lags),
            **({"controller/memory_mb": _resident_mb()} if _STATM.exists() else {}),
        }


def _resident_mb() -> float:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
