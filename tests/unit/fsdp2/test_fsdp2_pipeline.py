"""Stages give the loss, the logprobs and the gradients of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal.testing.models import Arch
from areal.testing.ranks import Ranks, free_rendezvous
from areal_fsdp2.pipeline import run_of_layers

CLOSE = 1e-5
RANKS = 4


def started(num_ranks: int, deadline_s: float = 60.0) -> Ranks:
    rendezvous = free_rendezvous()
    return Ranks(num_ranks, "pipeline_ranks:PipelineRank", lambda rank: (rank, num_ranks, rendezvous, deadline_s))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = started(RANKS)
    yield ranks
    ranks.close()


def assert_close(found: list[tuple[float, ...]]) -> None:
    for numbers in found:
        assert max(numbers) < CLOSE, found


@pytest.mark.parametrize(("arch", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False)])
def test_stages_compute_what_one_process_does(ranks: Ranks, arch: Arch, tied: bool) -> None:
    assert_close(ranks.call("trained", arch, 5, tied, 7))


@pytest.mark.parametrize("num_micro_batches", [1, 2, 7])
def test_two_stages(ranks: Ranks, num_micro_batches: int) -> None:
    assert_close(ranks.call("trained", "qwen3", 3, True, num_micro_batches, 2, "copies"))


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_fewer_micro_batches_than_stages(ranks: Ranks, num_micro_batches: int) -> None:
    assert_close(ranks.call("trained", "qwen3", 4, True, num_micro_batches))


def test_recomputed_activations(ranks: Ranks) -> None:
    assert_close(ranks.call("trained", "qwen3", 4, True, 5, 1, "recomputed"))


@pytest.mark.parametrize("tied", [True, False])
def test_stages_that_shard_over_data_ranks(ranks: Ranks, tied: bool) -> None:
    assert_close(ranks.call("trained", "qwen3", 3, tied, 4, 2, "sharded"))


def test_copies_of_tied_embeddings_stay_equal(ranks: Ranks) -> None:
    assert ranks.call("copies", "qwen3", 3) == [0.0] * RANKS


def test_a_stage_that_fails_or_does_not_come_is_named_in_time() -> None:
    ranks = started(2, deadline_s=4.0)
    try:
        (first, seconds), (second, _) = ranks.call("disturbed", "stays away")
        assert "WorkerFailed: pipeline stage 0 of 2 did not hear from stage 1 (trainer rank 1)" in first
        assert seconds < 10 and not second
    finally:
        ranks.close()


def test_an_error_of_a_stages_work_stays_what_it_is() -> None:
    ranks = started(2, deadline_s=4.0)
    try:
        (_, seconds), (second, _) = ranks.call("disturbed", "fails")
        assert second == "ConfigError: that is no model"
        assert seconds < 10
    finally:
        ranks.close()


def test_models_that_cannot_be_cut_are_refused(ranks: Ranks) -> None:
    for said in ranks.call("refused", "gpt2", 2, 2):
        assert said.startswith("WorkerFailed: pp is 2 and GPT2LMHeadModel") and said.endswith("use pp 1")
    for said in ranks.call("refused", "llama", 2, 3):
        assert said.startswith("WorkerFailed: pp is 3 and LlamaForCausalLM has 2 layers") and said.endswith("use pp 2")


@pytest.mark.parametrize("num_layers", [4, 5, 7])
def test_runs_cover_all_layers_and_the_first_are_longest(num_layers: int) -> None:
    runs = [run_of_layers(stage, 4, num_layers) for stage in range(4)]
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    assert [len(run) for run in runs] == sorted((len(run) for run in runs), reverse=True)
    assert len(runs[0]) - len(runs[3]) <= 1
