"""Experts on several ranks give the loss and the gradients of experts on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal.testing.ranks import Ranks, free_rendezvous

CLOSE = 1e-5
RANKS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    rendezvous = free_rendezvous()
    started = Ranks(RANKS, "expert_ranks:ExpertRank", lambda rank: (rank, RANKS, rendezvous))
    yield started
    started.close()


def assert_close(found: list[tuple[float, ...]]) -> None:
    for numbers in found:
        assert max(numbers) < CLOSE, found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_travel_to_the_experts_owners(ranks: Ranks, checkpointing: bool) -> None:
    assert_close(ranks.call("over_data", checkpointing))


def test_ranks_beside_the_owners_shard_the_experts(ranks: Ranks) -> None:
    assert_close(ranks.call("over_part_of_data", 2))


def test_ranks_with_the_same_tokens_add_what_their_experts_give(ranks: Ranks) -> None:
    assert_close(ranks.call("over_tensor", RANKS))


def test_tokens_travel_within_each_column_of_ranks_with_the_same_tokens(ranks: Ranks) -> None:
    assert_close(ranks.call("over_tensor", 2))


@pytest.mark.parametrize("crowded", [False, True])
def test_a_rank_without_tokens_computes_the_others(ranks: Ranks, crowded: bool) -> None:
    assert_close(ranks.call("one_layer", [0, 9, 0, 5], crowded))


def test_no_rank_has_tokens(ranks: Ranks) -> None:
    assert_close(ranks.call("one_layer", [0] * RANKS, False))


def test_half_precision_follows_autocast(ranks: Ranks) -> None:
    assert all(off < 0.01 for off in ranks.call("in_bf16"))


def test_experts_that_cannot_be_shared_out_evenly_are_refused_with_the_nearest_number(ranks: Ranks) -> None:
    for said in ranks.call("refused_experts", 6):
        assert said.startswith("WorkerFailed: ep is 4, which does not divide the 6 experts of Qwen3MoeForCausalLM")
        assert said.endswith("use ep 3")


def test_a_model_that_asks_for_the_auxiliary_loss_is_refused(ranks: Ranks) -> None:
    assert all("output_router_logits" in said for said in ranks.call("refused_auxiliary_loss"))
