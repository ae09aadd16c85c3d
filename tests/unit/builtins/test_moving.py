"""What leaves the device: everything. No device but the CPU is at hand, so the test looks at what is told to move.

Every tensor that an engine or a backend holds must be told where to go; the numbers after a way out and back are the
conformance kits' business. Nothing here shows that a GPU's memory is free afterwards.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from areal.algorithms.grpo import Grpo
from areal.builtins.moving import HOST, free_unused
from areal.builtins.torch_backend.backend import TorchBackend
from areal.builtins.transformers_engine.engine import TransformersEngine
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.contracts.messages import GenerateRequest, Sampling
from areal.contracts.specs import BackendContext, EngineContext, ModelSpec, TrainingSpec
from areal.testing.backend_fixtures import batch_of, sample_rows
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model

SMALL_BYTES = 64
"""Seeds, counters, and what a model computes from its configuration in its forward pass."""


def tensors_of(thing: Any) -> list[Tensor]:
    """Return all tensors that can be reached from an object, whatever holds them; each storage once."""
    seen: set[int] = set()
    found: dict[int, Tensor] = {}
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | type(gc) | asyncio.AbstractEventLoop):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found[id(each)] = each
        if callable(each) and hasattr(each, "__globals__"):
            continue  # a function's module is not the object's
        waiting += gc.get_referents(each)
    return list(found.values())


class Moves(TorchFunctionMode):
    """Sees every `Tensor.to`. Invariant: `targets` has the last device that each storage was told to go to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[int, torch.device] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            self.targets[storage_of(args[0])] = torch.device(args[1])
        return func(*args, **(kwargs or {}))


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def storages_of(thing: Any) -> dict[int, int]:
    """Return the bytes of each storage that an object holds, small ones left out."""
    return {storage_of(t): t.nbytes for t in tensors_of(thing) if t.nbytes > SMALL_BYTES}


def test_weights_moments_and_reference_of_the_backend_leave(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    context = BackendContext(
        model=ModelSpec(path=path), training=TrainingSpec(learning_rate=1e-3), accelerator=HostCpu(), seed=0
    )
    backend = TorchBackend(None, context)
    backend.start()
    backend.train_step(batch_of(sample_rows()), Grpo())
    backend.freeze_reference()
    model = backend._model
    assert model is not None
    parameters = list(model.module.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    held = storages_of(backend)
    assert sum(held.values()) >= 4 * weights, "weights, two moments, the reference"
    for move in (backend.offload, backend.onload):
        with Moves() as moves:
            move()
        assert held.keys() <= moves.targets.keys(), "somebody stays"
        assert set(moves.targets.values()) == {torch.device("cpu")}
    assert all(a is b for a, b in zip(parameters, model.module.parameters(), strict=True)), "who holds one sees it move"


async def test_weights_and_cache_of_the_engine_leave(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    context = EngineContext(model=ModelSpec(path=path), accelerator=HostCpu(), name="engine-0", seed=0)
    engine = TransformersEngine(TransformersEngineOptions(), context)
    await engine.start()
    sampling = Sampling(max_new_tokens=200)
    requests = [GenerateRequest(uid=str(i), prompt_ids=(1, 5, i), sampling=sampling, seed=i) for i in range(3, 9)]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    while engine.load()["tokens_total"] < 30:  # noqa: ASYNC110 -- nothing announces tokens
        await asyncio.sleep(0)
    await engine.pause()
    assert engine.load()["running"] > 0
    model = engine._model
    assert model is not None
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    for move in (engine.offload, engine.onload):
        with Moves() as moves:
            await move()
        held = storages_of(engine)  # without what the next pass makes anew
        assert sum(held.values()) > weights, "a cache"
        assert held.keys() <= moves.targets.keys(), "somebody stays"
    staged = engine._staging._parameters
    assert {id(each) for each in staged.values()} == {id(each) for each in model.module.parameters()}
    for request in running:
        request.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()


def test_a_cpu_gives_nothing_back() -> None:
    free_unused(HOST)
    free_unused(torch.device("cpu"))
