"""SFT is the mean negative log-likelihood, over the whole batch."""

from __future__ import annotations

import pickle

import pytest
import torch

from areal.algorithms.sft import Sft, SftOptions
from areal.contracts.algorithm import Algorithm, TokenBatch
from areal.contracts.messages import Group, Outcome, Prompt, Trajectory


def test_loss_and_gradient() -> None:
    logprobs = torch.tensor([-0.5, -2.0, 0.0], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(
        # None of these may matter.
        behavior_logprobs=torch.full((3,), torch.nan),
        proximal_logprobs=torch.full((3,), torch.nan),
        advantages=torch.full((3,), torch.nan),
        versions=torch.zeros(3, dtype=torch.int64),
        version=0,
        first_update=True,
        sequence=torch.tensor([0, 0, 1]),
        num_sequences=2,
        group=torch.tensor([0, 1]),
        entropy=torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        total_tokens=10,
        total_sequences=5,
        computed_tokens=4,
        computed_groups=2,
    )
    loss, stats = Sft().loss(logprobs, batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.25)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.1] * 3)
    assert {name: float(value) for name, value in stats.items()} == {"entropy": pytest.approx(1.5)}


def test_every_trajectory_counts_alike() -> None:
    outcomes = (Outcome.scored(3.0), Outcome.error("none"))
    group = Group(
        number=0,
        prompt=Prompt(environment="e", index=0, messages=()),
        trajectories=tuple(Trajectory(group=0, sample=i, turns=(), outcome=o) for i, o in enumerate(outcomes)),
    )
    sft = pickle.loads(pickle.dumps(Sft(SftOptions())))
    assert sft.advantages(group) == [1.0, 1.0]
    assert isinstance(sft, Algorithm)
    assert not sft.needs.advantage
