"""LoRA adapters as versions: load, serve, replace, unload, refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from vllm_stands import VllmStand, vllm_stand

from areal.contracts.messages import Completion
from areal.contracts.transfer import Adapter, TensorSpec, Transfer, checksum
from areal.errors import TransferFailed
from areal.testing.engine_fixtures import long_requests
from areal.testing.transfer import FOLDER_RESHARDER

if TYPE_CHECKING:
    from torch import Tensor

RANK, ALPHA = 4, 8.0
MODULES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStand]:
    with vllm_stand(tmp_path_factory.mktemp("adapted"), enable_lora=True, max_lora_rank=8) as stand:
        yield stand


def adapter_tensors(stand: VllmStand, seed: int, rank: int = RANK) -> dict[str, Tensor]:
    """Return random A [r, in] and B [out, r] for the adapted modules, under PEFT's names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, parameter in stand.models[0].named_parameters():
        base = name.removesuffix(".weight")
        if base.endswith(MODULES):
            size_out, size_in = parameter.shape
            tensors[f"base_model.model.{base}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator) * 0.1
            tensors[f"base_model.model.{base}.lora_B.weight"] = torch.randn(size_out, rank, generator=generator) * 0.1
    return tensors


def merged(stand: VllmStand, tensors: dict[str, Tensor]) -> Any:
    """Return the base model with W + (alpha / r) B A in place of W."""
    import torch

    model = stand.made(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if (a := tensors.get(f"{prefix}.lora_A.weight")) is not None:
                parameter += ALPHA / RANK * tensors[f"{prefix}.lora_B.weight"] @ a
    return model


async def publish(stand: VllmStand, version: int, tensors: dict[str, Tensor], rank: int = RANK) -> None:
    specs = tuple(TensorSpec(name=name, shape=tuple(t.shape), dtype="float32") for name, t in tensors.items())
    adapter = Adapter(rank=rank, alpha=ALPHA, target_modules=MODULES)
    plan = stand._resharder.plan(replace(stand.layout, adapter=adapter, tensors=specs), [stand.layout])
    stand._resharder.sender(plan).send(version, tensors.items(), 10.0)

    def phase(name: Any) -> Transfer:
        return Transfer(
            phase=name, version=version, resharder=FOLDER_RESHARDER, options=stand._options, plan=plan, deadline_s=20.0
        )

    receipt = await stand.engine.receive(phase("stage"))
    assert receipt.checksums == {name: checksum(tensor) for name, tensor in tensors.items()}
    await stand.engine.pause()
    try:
        await stand.engine.receive(phase("commit"))
        stand.version = version
    finally:
        await stand.engine.resume()


def versions(completions: list[Completion]) -> set[int]:
    return {version for completion in completions for version in completion.versions}


def test_an_adapter_is_loaded_replaced_and_unloaded(stand: VllmStand) -> None:
    async def replace_while_running(version: int, tensors: dict[str, Tensor]) -> list[Completion]:
        running = asyncio.ensure_future(stand.gather(long_requests(stand, 8, max_new_tokens=100)))
        await asyncio.sleep(0.03)
        await publish(stand, version, tensors)
        return await running

    for _ in range(3):
        version = next(stand._versions)
        tensors = adapter_tensors(stand, version)
        stand.models[version] = merged(stand, tensors)
        before = stand.version
        across = stand.run(replace_while_running(version, tensors))
        # The first adapter finds requests that began without one: they end on the bare model.
        assert versions(across) <= ({before} if before == 0 else {before, version})
        stand.check(across)
        after = stand.generate(long_requests(stand, 6, max_new_tokens=20))
        assert versions(after) == {version}
        stand.check(after)
    # Whole weights: the adapter goes.
    stand.run(stand.update(stand.new_version()))
    bare = stand.generate(long_requests(stand, 6, max_new_tokens=20))
    assert versions(bare) == {stand.version}
    stand.check(bare)


def test_an_adapter_that_vllm_refuses_leaves_the_old_weights(stand: VllmStand) -> None:
    assert stand.layout.max_adapter_rank == 8
    before, version = stand.version, next(stand._versions)
    with pytest.raises(TransferFailed, match="rank"):
        stand.run(publish(stand, version, adapter_tensors(stand, version, rank=16), rank=16))
    completions = stand.generate(long_requests(stand, 4, max_new_tokens=10))
    assert versions(completions) == {before}
    stand.check(completions)


def test_an_engine_without_lora_says_what_to_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    with vllm_stand(tmp_path_factory.mktemp("bare")) as bare:
        assert bare.layout.max_adapter_rank == 0
        with pytest.raises(TransferFailed, match=r"engine\.enable_lora"):
            bare.run(publish(bare, 1, adapter_tensors(bare, 1)))
        bare.check(bare.generate(long_requests(bare, 2, max_new_tokens=5)))
