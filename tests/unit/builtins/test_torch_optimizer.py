"""AdamW, clipping and loss scaling, against torch's own and against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from areal.builtins.torch_backend.optimizer import Optimizer
from areal.contracts.specs import AmpSpec, TrainingSpec

CPU = torch.device("cpu")
RATE = 0.01


def made(**training: Any) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    return module, Optimizer(module, TrainingSpec(**training), 1e-8, CPU)


def loss_of(module: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    return module(x).pow(2).sum()


def test_updates_are_those_of_clipped_adamw_with_decay_for_matrices_only() -> None:
    module, optimizer = made(grad_clip=0.5, weight_decay=0.1)
    other, _ = made()
    adam = torch.optim.AdamW(
        [{"params": [other.weight], "weight_decay": 0.1}, {"params": [other.bias], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for seed in range(5):
        optimizer.backward(loss_of(module, seed))
        norm, skipped = optimizer.step(RATE * (seed + 1))
        adam.zero_grad()
        loss_of(other, seed).backward()
        expected = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = RATE * (seed + 1)
        adam.step()
        assert not skipped
        assert norm == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(module.state_dict(), other.state_dict(), atol=1e-6, rtol=1e-6)


def test_gradients_add_up_until_the_step_and_are_forgotten_after_it() -> None:
    module, optimizer = made(grad_clip=0.0)
    for seed in range(3):
        optimizer.backward(loss_of(module, seed) / 3)
    whole, _ = made()
    (sum(loss_of(whole, seed) for seed in range(3)) / 3).backward()
    norm, _ = optimizer.step(RATE)
    assert norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in whole.parameters()])), rel=1e-5)
    assert optimizer.step(RATE) == (0.0, True)


@pytest.mark.parametrize("scale", ["dynamic", 4096.0])
def test_a_loss_scale_does_not_show(scale: Any) -> None:
    module, optimizer = made(amp=AmpSpec(enabled=True, dtype="fp16", loss_scale=scale))
    plain, unscaled = made()
    for seed in range(3):
        found = []
        for part, chosen in ((module, optimizer), (plain, unscaled)):
            chosen.backward(loss_of(part, seed))
            found.append(chosen.step(RATE))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
        assert found[0][1] is found[1][1] is False
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), atol=1e-5, rtol=1e-5)


def scale_of(optimizer: Optimizer) -> float:
    return optimizer.state_dict()["scaler"]["scale"]


def test_an_overflow_skips_the_update_and_halves_a_dynamic_scale() -> None:
    for scale, after in (("dynamic", 2.0**15), (4096.0, 4096.0)):
        module, optimizer = made(amp=AmpSpec(enabled=True, dtype="fp16", loss_scale=scale))
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        optimizer.backward(loss_of(module, 0) * float("inf"))
        _, skipped = optimizer.step(RATE)
        assert skipped
        torch.testing.assert_close(module.state_dict(), before, atol=0, rtol=0)
        assert scale_of(optimizer) == after
        optimizer.backward(loss_of(module, 0))
        assert not optimizer.step(RATE)[1]


def test_a_norm_that_overflows_skips_the_update_although_every_gradient_is_finite() -> None:
    module, optimizer = made()
    before = module.weight.detach().clone()
    optimizer.backward(module.weight.sum() * 1e38 + module.bias.sum() * 1e38)
    norm, skipped = optimizer.step(RATE)
    assert (norm, skipped) == (float("inf"), True)
    assert torch.equal(module.weight, before)


def test_frozen_parameters_stay() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    module.bias.requires_grad_(False)
    before = module.bias.clone()
    optimizer = Optimizer(module, TrainingSpec(weight_decay=0.5), 1e-8, CPU)
    optimizer.backward(loss_of(module, 0))
    optimizer.step(RATE)
    assert torch.equal(module.bias, before)
