"""Workers and messages for the tests of the simulated cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from areal.builtins.hooks import areal_resharders
from areal.builtins.sim.clock import charge
from areal.builtins.sim.engine import SimEngine, SimEngineOptions
from areal.builtins.sim.resharder import SimResharder, SimReshardOptions
from areal.contracts.component import Component
from areal.contracts.messages import GenerateRequest, Sampling
from areal.contracts.specs import EngineContext, ModelSpec
from areal.contracts.transfer import Layout, Phase, Transfer
from areal.testing.engine_fixtures import HostCpu

SIM_LAYOUT = Layout(host="sim", collective="sim")
(RESHARDER,) = (component for component in areal_resharders() if component.name == "sim")


class Charging:
    """Invariant: `log` has each call's method and the virtual time at which its method ran."""

    def __init__(self, *_: Any) -> None:
        self.log: list[tuple[str, float]] = []

    def compute(self, seconds: float) -> str:
        self.log.append(("compute", asyncio.get_running_loop().time()))
        charge(seconds)
        return "computed"

    def fail(self) -> None:
        charge(1.0)
        raise ValueError("no")

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    async def count(self, last: int) -> AsyncIterator[int]:
        for number in range(last):
            await asyncio.sleep(1.0)
            yield number

    def get_log(self) -> list[tuple[str, float]]:
        return self.log

    async def close(self) -> None:
        CLOSED.append(self)


CLOSED: list[Charging] = []


def engine(**options: Any) -> SimEngine:
    plain = {"step_s": 1.0, "step_s_per_request": 0.5, "prefill_s_per_token": 0.0, "start_s": 0.0, "swap_s": 0.0}
    context = EngineContext(model=ModelSpec(), accelerator=HostCpu(), name="engine-0", seed=1)
    return SimEngine(SimEngineOptions(**(plain | options)), context)


def request(num: int, seed: int = 0, prompt: int = 3, **more: Any) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=num)
    return GenerateRequest(uid="r", prompt_ids=tuple(range(5, 5 + prompt)), sampling=sampling, seed=seed, **more)


def transfer(phase: Phase, version: int, transfer_s: float = 0.0) -> Transfer:
    plan = SimResharder(SimReshardOptions(transfer_s=transfer_s), "").plan(SIM_LAYOUT, [SIM_LAYOUT])
    return Transfer(phase=phase, version=version, resharder=RESHARDER, options=None, plan=plan)


COMPUTES = Component(name="real", factory="sim_workers:Charging")
