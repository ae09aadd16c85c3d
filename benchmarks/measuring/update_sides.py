"""Trainer and engine of weight_update.py --engine vllm: AReaL's own, each in a process that is told what to do.

Times are seconds on the clock of the process that measures them; versions are the benchmark's running number.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from areal.builtins.accelerators.cpu import CpuAccelerator
from areal.contracts.messages import GenerateRequest, Sampling
from areal.contracts.specs import BackendContext, EngineContext, ModelSpec, TrainingSpec
from areal.contracts.transfer import Layout, Receipt, Transfer
from measuring.peer import parent

PROMPT_TOKENS = (16, 128)
ANSWER_TOKENS = (64, 256)
FIRST_TOKEN = 3
FACTOR = 1.02
"""Weights are multiplied by it or by its inverse, in turn: no version is the one before, all of them make sense."""


class Trainer:
    """The backend `torch` with a model's weights. Invariant: between two `change` the weights are one version."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch

        from areal.builtins.torch_backend.backend import TorchBackend

        torch.set_num_threads(1)
        spec = ModelSpec(path=model, dtype=dtype)
        context = BackendContext(model=spec, training=TrainingSpec(), accelerator=CpuAccelerator(), seed=0)
        self._backend = TorchBackend(None, context)
        self._backend.start()
        self._grown = False

    async def layout(self) -> Layout:
        return self._backend.layout()

    async def change(self) -> None:
        """Make other weights, as an optimizer's update would; nobody measures it."""
        factor = 1 / FACTOR if self._grown else FACTOR
        for _, weights in self._backend._weights():
            weights.mul_(factor)
        self._grown = not self._grown

    async def send(self, transfer: Transfer) -> tuple[Receipt, float]:
        """Return the receipt and the seconds until the trainer was free again."""
        began = time.perf_counter()
        receipt = self._backend.send(transfer)
        return receipt, time.perf_counter() - began

    async def close(self) -> None:
        self._backend.close()


class Engine:
    """`areal_vllm` with the load that it is put under. Invariant: the number of requests under way is constant."""

    def __init__(self, model: str, dtype: str, options: dict[str, Any], vocab_size: int) -> None:
        from areal_vllm.engine import VllmEngine
        from areal_vllm.options import VllmOptions

        spec = ModelSpec(path=model, dtype=dtype)
        context = EngineContext(model=spec, accelerator=CpuAccelerator(), name="engine-0", seed=0)
        self._engine = VllmEngine(VllmOptions(**options), context)
        self._vocab_size = vocab_size
        self._callers: list[asyncio.Task[None]] = []

    async def layout(self) -> Layout:
        """Load the model."""
        return await self._engine.start()

    async def work(self, num_requests: int) -> None:
        """Keep so many requests under way from now on; 0: none."""
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)
        self._callers = [asyncio.create_task(self._call(number)) for number in range(num_requests)]

    async def tokens(self) -> tuple[float, float]:
        """Return the time and the tokens made so far."""
        return time.perf_counter(), self._engine.load()["tokens_total"]

    async def stage(self, transfer: Transfer) -> tuple[Receipt, float]:
        """Return the receipt and the seconds until the version lay ready for every rank."""
        began = time.perf_counter()
        receipt = await self._engine.receive(transfer)
        return receipt, time.perf_counter() - began

    async def commit(self, transfer: Transfer) -> dict[str, float]:
        """Pause, commit and resume, as AReaL's publisher does; return the seconds of each and of all three."""
        times = [time.perf_counter()]
        await self._engine.pause("keep")
        times.append(time.perf_counter())
        try:
            await self._engine.receive(transfer)
            times.append(time.perf_counter())
        finally:
            await self._engine.resume()
        times.append(time.perf_counter())
        return {"wait_s": times[1] - times[0], "commit_s": times[2] - times[1], "pause_s": times[3] - times[0]}

    async def roll_back(self, transfer: Transfer) -> None:
        await self._engine.receive(transfer)

    async def close(self) -> None:
        await self.work(0)
        await self._engine.close()

    async def _call(self, number: int) -> None:
        """Make one request after the other, lengths spread so that they end at different times."""
        rng = random.Random(number)
        while True:
            prompt = tuple(rng.randrange(FIRST_TOKEN, self._vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS)))
            sampling = Sampling(max_new_tokens=rng.randint(*ANSWER_TOKENS))
            await self._engine.generate(
                GenerateRequest(uid=str(number), prompt_ids=prompt, sampling=sampling, seed=rng.getrandbits(31))
            )


SIDES: dict[str, Callable[..., Any]] = {"trainer": Trainer, "engine": Engine}


async def serve() -> None:
    """Answer questions, each a method's name and its arguments, until the other end hangs up."""
    connection, (name,) = parent()
    side = SIDES[name](*connection.recv())
    connection.send(await side.layout())
    while True:
        try:
            method, *arguments = await asyncio.to_thread(connection.recv)
        except EOFError:
            await side.close()
            return
        connection.send(await getattr(side, method)(*arguments))


if __name__ == "__main__":
    asyncio.run(serve())
