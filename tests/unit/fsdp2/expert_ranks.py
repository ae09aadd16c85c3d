"""What each rank does in the tests of expert parallelism; made in the ranks' own processes."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from transformers import Qwen3MoeForCausalLM

from areal.testing.models import family_module
from areal_fsdp2.experts import expert_layers, spread_experts

VOCAB = 64
NUM_EXPERTS = 8


def moe_model(**changes: Any) -> Qwen3MoeForCausalLM:
    """Return a tiny random mixture of experts, the same in every process."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8}
    return family_module("qwen3_moe", **{**sizes, "num_experts": NUM_EXPERTS, "norm_topk_prob": True, **changes})


def rows_of(rank: int) -> Tensor:
    """Return the tokens of a data-parallel rank, [1, T] with another T on each."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCAB, (1, 5 + 3 * rank), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the sum of the tokens' cross entropies."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum")


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class ExpertRank:
    """Invariant: every method computes the single-process numbers too and returns how far the spread ones are off."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        self.rank, self.world_size = rank, world_size

    def mesh(self, ep: int = 1, tp: int = 1) -> DeviceMesh:
        sizes = (self.world_size // (ep * tp), ep, tp)
        return init_device_mesh("cpu", sizes, mesh_dim_names=("beside", "ep", "tp"))

    def expected(self, tokens: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
        model = moe_model(experts_implementation="eager")
        losses = [loss_of(model, some) for some in tokens]
        sum(losses).backward()  # type: ignore[union-attr]
        return float(sum(losses)), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def over_data(self, checkpointing: bool) -> tuple[float, float]:
        """Experts over all ranks, each with its own tokens."""
        loss, grads = self.expected([rows_of(rank) for rank in range(self.world_size)])
        model = moe_model()
        mesh = self.mesh(ep=self.world_size)["ep", "tp"]
        experts = spread_experts(model, mesh)
        mine = {id(p) for part in experts for p in part.parameters()}
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        share = loss_of(model, rows_of(self.rank))
        share.backward()
        for parameter in model.parameters():
            if id(parameter) not in mine:
                dist.all_reduce(parameter.grad)
        return self.distance(share, loss, model, grads)

    def over_part_of_data(self, ep: int) -> tuple[float, float]:
        """FSDP over all ranks; experts over `ep` of them, and what is left of the ranks shards the experts' rows."""
        loss, grads = self.expected([rows_of(rank) for rank in range(self.world_size)])
        model = moe_model()
        mesh = self.mesh(ep=ep)
        experts = spread_experts(model, mesh["ep", "tp"])
        for part in experts:
            fully_shard(part, mesh=mesh["beside"], shard_placement_fn=lambda _: Shard(1))
        data = mesh["beside", "ep"]._flatten("data")
        for layer in model.model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
        share = loss_of(model, rows_of(self.rank))
        share.backward()
        return self.distance(share, loss, model, grads)

    def over_tensor(self, tp: int) -> tuple[float, float]:
        """Experts over all ranks; `tp` neighbours have the same tokens."""
        ep = self.world_size // tp
        loss, grads = self.expected([rows_of(rank) for rank in range(ep)])
        model = moe_model()
        mesh = self.mesh(ep, tp)
        mine = {id(p) for part in spread_experts(model, mesh["ep", "tp"]) for p in part.parameters()}
        share = loss_of(model, rows_of(self.rank // tp))
        share.backward()
        for parameter in model.parameters():
            if id(parameter) not in mine:
                dist.all_reduce(parameter.grad, group=mesh.get_group("ep"))
        return self.distance(share / tp, loss, model, grads)

    def one_layer(self, num_tokens: list[int], crowded: bool) -> tuple[float, float]:
        """Some ranks have no tokens; with `crowded` all tokens want the same two experts.

        Returns how far what belongs to the rank's tokens is off, and the gradients of the experts.
        """
        generator = torch.Generator().manual_seed(7)
        hidden = [torch.randn(n, 32, generator=generator) for n in num_tokens]
        scores = [torch.rand(n, NUM_EXPERTS, generator=generator) for n in num_tokens]
        if crowded:
            scores = [score + torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]) for score in scores]
        chosen = [score.topk(2) for score in scores]
        reference = expert_layers(moe_model(experts_implementation="eager"))[0]
        theirs = torch.cat(hidden).requires_grad_()
        weights = torch.cat([top.values for top in chosen]).requires_grad_()
        expected = reference(theirs, torch.cat([top.indices for top in chosen]), weights)
        if sum(num_tokens):
            expected.square().sum().backward()

        mesh = self.mesh(ep=self.world_size)["ep", "tp"]
        experts = spread_experts(moe_model(), mesh)[0]
        mine = hidden[self.rank].requires_grad_()
        my_weights = chosen[self.rank].values.requires_grad_()
        found = experts(mine, chosen[self.rank].indices, my_weights)
        found.square().sum().backward()
        span = slice(sum(num_tokens[: self.rank]), sum(num_tokens[: self.rank + 1]))
        numbers = [0.0]
        if len(found):
            pairs = [(found, expected[span]), (mine.grad, theirs.grad[span]), (my_weights.grad, weights.grad[span])]  # type: ignore[index]
            numbers = [float((ours - right).abs().max()) for ours, right in pairs]  # type: ignore[operator]
        far = [
            float((whole(p.grad) - (0.0 if q.grad is None else q.grad)).abs().max())  # type: ignore[arg-type]
            for p, q in zip(experts.parameters(), reference.parameters(), strict=True)
        ]
        return max(numbers), max(far)

    def in_bf16(self) -> float:
        """Under autocast the spread experts give what unspread ones give, up to the dtype's rounding."""
        tokens = rows_of(self.rank)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            expected = float(loss_of(moe_model(experts_implementation="eager"), tokens))
            model = moe_model()
            mesh = self.mesh(ep=self.world_size)["ep", "tp"]
            spread_experts(model, mesh)
            return abs(float(loss_of(model, tokens)) - expected) / expected

    def refused(self, **changes: Any) -> str:
        mesh = self.mesh(ep=self.world_size)["ep", "tp"]
        try:
            spread_experts(moe_model(**changes), mesh)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def refused_experts(self, num_experts: int) -> str:
        return self.refused(num_experts=num_experts)

    def refused_auxiliary_loss(self) -> str:
        return self.refused(output_router_logits=True)

    def distance(self, share: Tensor, loss: float, model: nn.Module, grads: dict[str, Tensor]) -> tuple[float, float]:
        """Return how far the sum of the ranks' shares and the farthest gradient are off, relative to what is right."""
        total = share.detach().clone()
        dist.all_reduce(total)
        off = 0.0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            off = max(off, float((whole(parameter.grad) - grads[name]).abs().max() / grads[name].abs().max()))
        assert len(grads) == len(list(model.parameters()))
        return abs(float(total) - loss) / loss, off
