"""What each rank does in the tests of the pipeline; made in the ranks' own processes."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from areal.algorithms.update import attention
from areal.algorithms.update.logprobs import head_logprobs
from areal.algorithms.update.packing import Packed, pack
from areal.contracts.messages import Row
from areal.errors import ConfigError
from areal.testing.models import Arch, tiny_module
from areal_fsdp2.pipeline import Pipeline, add_tied, keep_stage

VOCAB = 64
WIDTH = 64


def packed_rows(numbers: list[int]) -> list[Packed]:
    """Return micro-batches of two rows each; micro-batch n is the same wherever it is asked for."""
    found: list[Packed] = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        rows: list[Row] = []
        for length in (4 + number, 7 + 5 * (number % 3)):
            ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            none = (0.0,) * length
            mask = (False, *(True,) * (length - 1))
            rows.append(
                Row(token_ids=tuple(ids), loss_mask=mask, logprobs=none, versions=(0,) * length, advantages=none)
            )
        found.append(pack(rows, range(2), torch.device("cpu")))
    return found


class Staged(nn.Module):
    """A model as a stage computes it. Invariant: FSDP's root covers embedding, layers and head."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, packed: Packed, received: Tensor | None, is_last: bool) -> Tensor:
        start = {"input_ids": packed.token_ids.unsqueeze(0)} if received is None else {"inputs_embeds": received}
        hidden = self.module.base_model(
            **start, position_ids=packed.positions.unsqueeze(0), row_groups=packed.groups, use_cache=False
        ).last_hidden_state
        if not is_last:
            return hidden
        head = self.module.get_output_embeddings()
        states = hidden[0, packed.predictors]
        return head_logprobs(states, head.weight, packed.predictor, packed.targets, 1.0)[0]


def model(arch: Arch, layers: int, tied: bool) -> Staged:
    module = tiny_module(arch=arch, layers=layers, tied=tied, hidden=WIDTH, vocab=VOCAB)
    module.set_attn_implementation(attention.NAME)
    return Staged(module)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class PipelineRank:
    """Invariant: every method computes the single-process numbers too and returns how far the staged ones are off."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, deadline_s: float = 60.0) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=deadline_s),
        )
        self.rank, self.world_size = rank, world_size

    def trained(
        self, arch: Arch, layers: int, tied: bool, num_micro_batches: int, dp: int = 1, how: str = ""
    ) -> tuple[float, float, float]:
        """Return how far loss, logprobs and gradients are off, relative to the largest of their kind.

        `how`: ``recomputed`` activations, weights ``sharded`` over the data ranks, or ``copies`` on each of them.
        """
        numbers = list(range(num_micro_batches * dp))
        batches = packed_rows(numbers)
        plain = model(arch, layers, tied)
        right = [plain(packed, None, True) for packed in batches]
        loss = sum(-logprobs.sum() for logprobs in right)
        loss.backward()  # type: ignore[union-attr]

        mesh = init_device_mesh("cpu", (self.world_size // dp, dp), mesh_dim_names=("pp", "dp"))
        pipeline = Pipeline(mesh["pp"].get_group(), torch.device("cpu"), WIDTH, torch.float32)
        staged = model(arch, layers, tied)
        has_copy = keep_stage(staged.module, pipeline.stage, pipeline.num_stages)
        if how == "recomputed":
            staged.module.train()
            staged.module.gradient_checkpointing_enable({"use_reentrant": False})
        if how == "sharded":
            shard(staged, mesh["dp"])
        mine = numbers[mesh["dp"].get_local_rank() :: dp]
        share, logprobs = passes(pipeline, staged, [batches[number] for number in mine])
        if has_copy:
            add_tied(staged.module.get_input_embeddings().weight, pipeline.group)
        if how == "copies":
            for parameter in staged.parameters():
                dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        total = torch.tensor(share, dtype=torch.float32)
        dist.all_reduce(total)
        assert len(logprobs) == (len(mine) if pipeline.is_last else 0)
        off = [float((ours - right[n]).abs().max()) for n, ours in zip(mine, logprobs, strict=False)]
        return abs(float(total) / float(loss.detach()) - 1), max(off, default=0.0), self.gradients(staged, plain)

    def gradients(self, staged: Staged, plain: Staged) -> float:
        """Return the farthest gradient; all parameters of the whole model must be on some stage."""
        right = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        off = 0.0
        names = [name for name, _ in staged.named_parameters()]
        assert set(names) < set(right)
        for name, parameter in staged.named_parameters():
            assert parameter.grad is not None, name
            off = max(off, float((whole(parameter.grad) - right[name]).abs().max() / right[name].abs().max()))
        everybody: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everybody, names)
        assert {name for some in everybody for name in some} == set(right)
        return off

    def copies(self, arch: Arch, steps: int) -> float:
        """Train tied embeddings for some steps and return how far the two ends' copies are apart: 0."""
        pipeline = Pipeline(dist.group.WORLD, torch.device("cpu"), WIDTH, torch.float32)  # type: ignore[arg-type]
        staged = model(arch, self.world_size, True)
        has_copy = keep_stage(staged.module, pipeline.stage, pipeline.num_stages)
        adam = torch.optim.AdamW(staged.parameters(), lr=1e-2)
        for step in range(steps):
            own = packed_rows([3 * step + n for n in range(3)])

            def learn(number: int, received: Tensor | None, own: list[Packed] = own) -> Tensor:
                output = staged(own[number], received, pipeline.is_last)
                return -output.sum() if pipeline.is_last else output

            pipeline.train([len(packed.token_ids) for packed in own], learn, lambda _: None)
            if has_copy:
                add_tied(staged.module.get_input_embeddings().weight, pipeline.group)
            adam.step()
            adam.zero_grad()
        weight = torch.zeros(VOCAB, WIDTH)
        if has_copy:
            weight = staged.module.get_input_embeddings().weight.detach().clone()
        first, last = weight.clone(), weight.clone()
        dist.broadcast(first, 0)
        dist.broadcast(last, self.world_size - 1)
        moved = float((last - model(arch, 1, True).module.get_input_embeddings().weight).abs().max())
        assert moved > 1e-3
        return float((first - last).abs().max())

    def disturbed(self, how: str) -> tuple[str, float]:
        """One stage fails or does not come; return what each stage says, and after how many seconds."""
        pipeline = Pipeline(dist.group.WORLD, torch.device("cpu"), WIDTH, torch.float32)  # type: ignore[arg-type]

        def work(number: int, received: Tensor | None) -> Tensor:
            if how == "fails" and self.rank == 1 and number == 1:
                raise ConfigError("that is no model")
            return torch.zeros(1, 3, WIDTH) if received is None else received

        started = time.monotonic()
        try:
            if how == "fails" or self.rank == 0:
                pipeline.evaluate([3, 3, 3], work)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started
        return "", time.monotonic() - started

    def refused(self, arch: Arch, layers: int, num_stages: int) -> str:
        try:
            keep_stage(tiny_module(arch=arch, layers=layers), 0, num_stages)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def passes(pipeline: Pipeline, staged: Staged, own: list[Packed]) -> tuple[float, list[Tensor]]:
    """Look at micro-batches, then learn from them; return the loss and the logprobs, both on the last stage only."""
    lengths = [len(packed.token_ids) for packed in own]
    shares: list[float] = []
    logprobs: list[Tensor] = []

    def learn(number: int, received: Tensor | None) -> Tensor:
        output = staged(own[number], received, pipeline.is_last)
        if pipeline.is_last:
            output = -output.sum()
            shares.append(float(output.detach()))
        return output

    def look(number: int, received: Tensor | None) -> Tensor:
        output = staged(own[number], received, pipeline.is_last)
        if pipeline.is_last:
            logprobs.append(output)
        return output

    def before_backward(is_last: bool) -> None:
        if isinstance(staged, FSDPModule):
            staged.set_requires_gradient_sync(is_last)
            staged.set_is_last_backward(is_last)

    pipeline.evaluate(lengths, look)
    pipeline.train(lengths, learn, before_backward)
    return sum(shares), logprobs


def shard(staged: Staged, mesh: Any) -> None:
    for layer in staged.module.base_model.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(staged, mesh=mesh)
    for part in staged.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
