"""The engines' load as metrics: what each replica says becomes one figure for the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from areal.contracts.cluster import Handle
from areal.errors import WorkerFailed

DEADLINE_S = 5.0
"""An engine that is asked while it starts a long pass answers a moment later, or is left out."""
AVERAGED = ("_usage", "_share")
"""Ends of the names of figures that are averaged over the replicas; all others are summed."""


class LoadMeter:
    """Asks engines how busy they are. Invariant: `figures` are those of one moment, and no rate is negative.

    A replica counts its tokens from 0, so they are compared with what the same replica said before.
    """

    def __init__(self) -> None:
        self.figures: Mapping[str, float] = {}
        """The newest answers as ``engine/...``."""
        self._tokens: dict[str, float] = {}
        self.loads: Mapping[str, Mapping[str, float]] = {}
        """The newest answer of each replica that gave one."""
        self._asked_at: float | None = None
        self._is_asking = False
        self._progress: dict[str, tuple[float, float]] = {}
        """When each replica that tells was last seen to work or to have nothing to do, and its tokens then."""

    async def measure(self, engines: Mapping[str, Handle]) -> None:
        """Ask all engines at once, unless they are still being asked; ``engine/silent`` counts those without answer."""
        if self._is_asking:
            return
        self._is_asking = True
        try:
            asked_at = _now()
            answers = await asyncio.gather(*(_load(handle) for handle in engines.values()))
        finally:
            self._is_asking = False
        loads = {name: load for name, load in zip(engines, answers, strict=True) if load is not None}
        figures = _combined(list(loads.values())) | {"silent": float(len(engines) - len(loads))}
        tokens = {name: load["tokens_total"] for name, load in loads.items() if "tokens_total" in load}
        if tokens and self._asked_at is not None and asked_at > self._asked_at:  # a virtual clock may stand still
            made = sum(max(0.0, total - self._tokens.get(name, 0.0)) for name, total in tokens.items())
            figures["tokens_per_s"] = made / (asked_at - self._asked_at)
        # The tokens of a silent replica count when it speaks again.
        self._tokens = {name: tokens.get(name, self._tokens.get(name, 0.0)) for name in engines}
        self._asked_at = asked_at
        self.loads = loads
        self._note_progress(asked_at)
        self.figures = {f"engine/{name}": value for name, value in figures.items()}

    def _note_progress(self, now: float) -> None:
        told = {name: load for name, load in self.loads.items() if {"tokens_total", "running"} <= load.keys()}
        for name, load in told.items():
            since, tokens = self._progress.get(name, (now, -1.0))
            is_stuck = load["running"] > 0 and load["tokens_total"] == tokens
            self._progress[name] = (since if is_stuck else now, load["tokens_total"])
        self._progress = {name: self._progress[name] for name in told}

    def stuck_s(self, name: str) -> float:
        """For how many seconds a replica has had requests and made no token, as far as it tells."""
        if self._asked_at is None or name not in self._progress:
            return 0.0
        return self._asked_at - self._progress[name][0]

    def excuse(self) -> None:
        """Begin anew to count the seconds without progress."""
        now = _now()
        self._progress = {name: (now, tokens) for name, (_, tokens) in self._progress.items()}


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _load(engine: Handle) -> dict[str, float] | None:
    try:
        return await engine.call("load", deadline_s=DEADLINE_S)
    except WorkerFailed:
        return None


def _combined(loads: list[dict[str, float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key in dict.fromkeys(key for load in loads for key in load if key != "version"):
        values = [load[key] for load in loads if key in load]
        figures[key] = sum(values) / (len(values) if key.endswith(AVERAGED) else 1)
    return figures
