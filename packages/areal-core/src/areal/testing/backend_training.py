"""The backend kit's cases of one training step: what it computes, whatever the packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from areal.algorithms.grpo import Grpo
from areal.algorithms.sft import Sft
from areal.contracts.algorithm import Needs, TokenBatch
from areal.contracts.backend import Backend
from areal.contracts.messages import Group
from areal.testing.backend_fixtures import (
    TOLERANCE,
    BackendFixtures,
    Published,
    batch_of,
    row,
    sample_rows,
    true_gradient_norm,
    truth,
)

if TYPE_CHECKING:
    from torch import Tensor


class Watching:
    """Remembers what a loss is given. Invariant: the loss is `inner`'s, times `factor`."""

    needs = Needs(advantage=False)

    def __init__(self, factor: float = 1.0) -> None:
        self.seen: list[tuple[Tensor, TokenBatch]] = []
        self._factor = factor

    def advantages(self, group: Group) -> Sequence[float | Sequence[float]]:
        return [1.0] * len(group.trajectories)

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.seen.append((logprobs.detach().clone(), batch))
        loss = -(self._factor * logprobs).sum() / batch.total_tokens
        most = batch.advantages.max()
        return loss, {"share": batch.advantages.sum() / batch.total_tokens, "advantage_max": most}


class BackendTraining(BackendFixtures):
    """Invariant: the numbers that a step reports and leaves behind are those of transformers, row by row."""

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_logprobs_are_those_of_transformers(
        self, start: Callable[..., Backend], model_path: str, temperature: float
    ) -> None:
        batch = batch_of(sample_rows(), temperature=temperature)
        found, expected = start().logprobs(batch), truth(model_path, batch)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=TOLERANCE, rel=0)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_the_gradient_is_that_of_transformers(
        self, start: Callable[..., Backend], model_path: str, temperature: float
    ) -> None:
        batch = batch_of(sample_rows(), temperature=temperature)
        stats = start().train_step(batch, Sft())
        assert stats["grad_norm"] == pytest.approx(true_gradient_norm(model_path, batch), rel=1e-4)
        tokens = [value for values in truth(model_path, batch) for value in values]
        assert stats["loss"] == pytest.approx(-sum(tokens) / batch.num_tokens, rel=1e-5)
        assert stats["skipped"] == 0

    def test_the_update_does_not_depend_on_the_packing(self, start: Callable[..., Backend]) -> None:
        rows = sample_rows()
        found = []
        # In one piece, a few rows at a time, every row alone; forwards and backwards.
        for tokens, order in ((10_000, 1), (64, 1), (64, -1), (1, -1)):
            backend = start(micro_batch_tokens=tokens, learning_rate=1e-3)
            stats = [backend.train_step(batch_of(rows[::order]), Grpo()) for _ in range(3)]
            after = backend.logprobs(batch_of(rows))
            found.append((stats, [value for values in after for value in values]))
        for stats, logprobs in found[1:]:
            for step, expected in zip(stats, found[0][0], strict=True):
                assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert logprobs == pytest.approx(found[0][1], abs=TOLERANCE, rel=0)
        # The weights did move, by far more than they may differ.
        before = [value for values in start().logprobs(batch_of(rows)) for value in values]
        assert max(abs(a - b) for a, b in zip(before, found[0][1], strict=True)) > 10 * TOLERANCE

    def test_the_totals_count_rows_that_were_left_out(self, start: Callable[..., Backend]) -> None:
        rows = sample_rows()
        whole = batch_of(rows)
        alone = start().train_step(whole, Sft())
        diluted = start().train_step(replace(whole, num_tokens=4 * whole.num_tokens), Sft())
        assert diluted["loss"] == pytest.approx(alone["loss"] / 4, rel=1e-5)
        assert diluted["grad_norm"] == pytest.approx(alone["grad_norm"] / 4, rel=1e-4)

    @pytest.mark.parametrize("tokens", [10_000, 50])
    def test_the_loss_sees_every_trained_token_once(self, start: Callable[..., Backend], tokens: int) -> None:
        rows = [*sample_rows(), replace(row([5, 6], [7]), loss_mask=(False, False, False))]
        batch = batch_of(rows, num_tokens=1000, num_sequences=99)
        watching = Watching()
        stats = start(micro_batch_tokens=tokens).train_step(batch, watching)
        seen: list[tuple[float, ...]] = []
        for logprobs, part in watching.seen:
            fields = (part.behavior_logprobs, part.advantages, part.versions, part.proximal_logprobs, part.entropy)
            assert {tuple(field.shape) for field in (*fields, part.sequence)} == {tuple(logprobs.shape)}
            assert (part.total_tokens, part.total_sequences) == (1000, 99)
            assert part.computed_tokens == sum(r.num_loss_tokens for r in rows)
            assert sorted(set(part.sequence.tolist())) == list(range(part.num_sequences))
            assert part.sequence.tolist() == sorted(part.sequence.tolist())
            seen += zip(*(field.tolist() for field in fields[:3]), strict=True)
        expected = [
            (behavior, advantage, version)
            for r in rows
            for behavior, advantage, version, trained in zip(
                r.logprobs, r.advantages, r.versions, r.loss_mask, strict=True
            )
            if trained
        ]
        assert len(watching.seen) > 1 or tokens > 50
        for mine, theirs in zip(sorted(seen), sorted(expected), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        assert stats["share"] == pytest.approx(sum(advantage for _, advantage, _ in expected) / 1000, rel=1e-5)
        assert stats["advantage_max"] == pytest.approx(max(advantage for _, advantage, _ in expected), rel=1e-6)

    def test_proximal_logprobs_are_the_current_ones_or_the_given_ones(self, start: Callable[..., Backend]) -> None:
        backend, batch, watching = start(), batch_of(sample_rows()), Watching()
        known = backend.logprobs(batch)
        given = replace(batch, rows=tuple(r.with_proximal(p) for r, p in zip(batch.rows, known, strict=True)))
        # Before the first update all three are the same number.
        backend.train_step(given, watching, 1e-9)
        backend.train_step(batch, watching, 1e-9)
        for logprobs, part in watching.seen:
            assert not part.proximal_logprobs.requires_grad
            assert part.entropy.requires_grad
            assert part.proximal_logprobs.tolist() == pytest.approx(logprobs.tolist(), abs=1e-6)
        moved = replace(
            batch, rows=tuple(r.with_proximal(tuple(x - 1 for x in p)) for r, p in zip(batch.rows, known, strict=True))
        )
        watching.seen.clear()
        backend.train_step(moved, watching, 1e-9)
        for logprobs, part in watching.seen:
            assert part.proximal_logprobs.tolist() == pytest.approx((logprobs - 1).tolist(), abs=1e-5)

    def test_the_entropy_is_that_of_the_whole_distribution(
        self, start: Callable[..., Backend], model_path: str
    ) -> None:
        watching = Watching()
        # One row for each token of the vocabulary after the same prompt: together they are the distribution.
        rows = [row([1, 9], [token]) for token in range(64)]
        start().train_step(batch_of(rows, temperature=0.7), watching)
        logprobs = [value for part, _ in watching.seen for value in part.exp().tolist()]
        assert sum(logprobs) == pytest.approx(1, abs=1e-5)
        expected = -sum(float((part.exp() * part).sum()) for part, _ in watching.seen)
        for _, part in watching.seen:
            assert part.entropy.tolist() == pytest.approx([expected] * len(part.entropy), rel=1e-4)

    def test_supervised_steps_lower_the_loss(self, start: Callable[..., Backend]) -> None:
        backend, batch = start(learning_rate=3e-3), batch_of([row([1, 9, 8], [7, 6, 5, 4]), row([1, 3], [9, 9])])
        losses = [backend.train_step(batch, Sft())["loss"] for _ in range(25)]
        assert losses[-1] < 0.2 * losses[0]

    def test_the_gradient_norm_is_that_before_clipping(self, start: Callable[..., Backend]) -> None:
        batch = batch_of(sample_rows())
        norms = {clip: start(grad_clip=clip).train_step(batch, Sft())["grad_norm"] for clip in (0.0, 1e-3, 1e6)}
        assert norms[1e-3] > 1e-2
        assert list(norms.values()) == pytest.approx([norms[0.0]] * 3, rel=1e-5)

    @pytest.mark.parametrize("factor", [float("nan"), float("inf")])
    def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], factor: float
    ) -> None:
        backend, batch = start(learning_rate=1e-3), batch_of(sample_rows())
        before = publish(backend).receipt.checksums
        assert backend.train_step(batch, Watching(factor))["skipped"] == 1
        assert publish(backend).receipt.checksums == before
        assert backend.train_step(batch, Sft())["skipped"] == 0
        assert publish(backend).receipt.checksums != before

    @pytest.mark.parametrize("rows", [(), (replace(row([5, 6], [7]), loss_mask=(False, False, False)),)])
    def test_an_empty_batch_leaves_the_weights_alone(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], rows: Any
    ) -> None:
        backend = start(learning_rate=1e-3)
        before = publish(backend).receipt.checksums
        batch = batch_of(rows)
        assert backend.logprobs(batch) == [(0.0,) * len(r.token_ids) for r in rows]
        stats = backend.train_step(batch, Sft())
        assert (stats["skipped"], stats["loss"], stats["grad_norm"]) == (1, 0, 0)
        assert publish(backend).receipt.checksums == before
