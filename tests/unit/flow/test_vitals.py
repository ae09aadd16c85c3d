"""The controller's own health: a blocked event loop shows."""

from __future__ import annotations

import asyncio
import time

from areal.flow import vitals as vitals_module
from areal.flow.vitals import Vitals


async def test_a_blocked_loop_is_late(monkeypatch) -> None:
    monkeypatch.setattr(vitals_module, "EVERY_S", 0.01)
    vitals = Vitals()
    assert vitals.collect()["controller/lag_max_s"] == 0.0
    measuring = asyncio.create_task(vitals.measure_forever())
    await asyncio.sleep(0.03)
    time.sleep(0.2)  # noqa: ASYNC251 -- this is what is measured
    await asyncio.sleep(0.03)
    found = vitals.collect()
    assert 0.1 < found["controller/lag_max_s"] < 2.0 and found["controller/lag_mean_s"] < found["controller/lag_max_s"]
    assert 10 < found["controller/memory_mb"] < 100_000
    await asyncio.sleep(0.05)
    assert vitals.collect()["controller/lag_max_s"] < found["controller/lag_max_s"], "told once"
    measuring.cancel()
