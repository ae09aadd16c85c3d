"""What benchmarks/train_vs_trl.py compares is the same: the batches of its cases, and the update of every side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring.step_batches import CASES, num_tokens, padded_tokens
from measuring.step_sides import SIDES, moved_apart
from measuring.trl_environment import MAKING_S, trl_python
from safetensors.torch import save_file
from train_vs_trl import GROSS, arguments, check

CHECKING_S = 600.0


@settings(max_examples=30)
@given(groups=st.integers(1, 3), group_size=st.integers(2, 5), tokens=st.integers(32, 80), seed=st.integers(0, 9))
def test_cases_have_as_many_tokens_and_differ_in_one_thing(
    groups: int, group_size: int, tokens: int, seed: int
) -> None:
    made = {name: case.rows(groups, group_size, tokens, 500, seed) for name, case in CASES.items()}
    assert len({num_tokens(rows) for rows in made.values()}) == 1
    assert {len(rows) for rows in made.values()} == {groups * group_size}
    assert padded_tokens(made["uniform"]) == num_tokens(made["uniform"]) == padded_tokens(made["shared"])
    assert padded_tokens(made["spread"]) > num_tokens(made["spread"])
    prompts = {name: {tuple(row["prompt_ids"]) for row in rows} for name, rows in made.items()}
    assert {name: len(own) for name, own in prompts.items()} == {
        "uniform": groups * group_size,
        "spread": groups * group_size,
        "shared": groups,
    }


def test_weights_that_went_another_way_are_told_apart(tmp_path: Path) -> None:
    first = torch.zeros(4)
    went = {
        "began": first,
        "one": first + 1.0,
        "same": first + 1.0,
        "other": first + torch.tensor([1.0, 1.0, 1.0, 0.0]),
    }
    for name, weight in went.items():
        (tmp_path / name).mkdir()
        save_file({"weight": weight}, tmp_path / name / "model.safetensors")
    folders = [str(tmp_path / name) for name in ("one", "same", "other")]
    assert moved_apart(str(tmp_path / "began"), folders) == pytest.approx([0.0, 0.0, 0.5])


@pytest.mark.slow
@pytest.mark.timeout(MAKING_S + CHECKING_S + 60)
def test_every_side_makes_the_same_update(tmp_path: Path) -> None:
    """fsdp2 on 1 and 2 processes, torch, and TRL on 1 and 2: three steps of a tiny model."""
    args = arguments(["--deadline-s", str(CHECKING_S / 5), "--trl-wait-policy", "passive"])
    args.trl_python = trl_python()
    found = check(args, SIDES, tmp_path)
    assert list(found) == [side.name for side in SIDES]
    for one in found.values():
        assert all(one[key] <= GROSS[key] for key in GROSS)
        norms = [step["grad_norm"] for step in one["steps"]]
        assert min(norms) > 0
        assert len(set(norms)) == len(norms), "a step that changes nothing would agree with any other"
