"""The backend kit's cases of what a backend may offer besides: a reference policy, a critic; and of whole groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from areal.algorithms.dpo import Dpo
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.ppo import ValueLoss
from areal.contracts.backend import CRITIC, Backend, KeepsReference, Values
from areal.contracts.component import Component
from areal.contracts.messages import Batch, Row
from areal.errors import WorkerFailed
from areal.testing.backend_fixtures import TOLERANCE, BackendFixtures, Published, batch_of, row, sample_rows
from areal.testing.backend_training import Watching

Start = Callable[..., Backend]


class BackendRoles(BackendFixtures):
    """Invariant: a case about something that the backend does not offer is skipped, and says so."""

    @pytest.fixture
    def start_keeper(self, start: Start) -> Callable[..., KeepsReference]:
        """Return the function that starts a backend which keeps a reference."""

        def started(**training: float) -> KeepsReference:
            backend = start(**training)
            if not isinstance(backend, KeepsReference):
                pytest.skip("the backend keeps no reference")
            return backend

        return started

    @pytest.fixture
    def start_critic(self, start: Start, component: Component) -> Callable[..., Values]:
        """Return the function that starts the backend as a critic."""
        if CRITIC not in component.capabilities:
            pytest.skip("the backend does not declare 'critic'")

        def started(**training: float) -> Values:
            backend = start(role="critic", **training)
            assert isinstance(backend, Values)
            return backend

        return started

    def test_training_leaves_the_reference_alone(
        self, start: Start, start_keeper: Callable[..., KeepsReference], publish: Callable[[Backend], Published]
    ) -> None:
        keeper, batch = start_keeper(learning_rate=1e-3), batch_of(sample_rows())
        twin = start(learning_rate=1e-3)
        with pytest.raises(WorkerFailed, match="no reference"):
            keeper.reference_logprobs(batch)
        before = keeper.logprobs(batch)
        keeper.freeze_reference()
        for _ in range(3):
            assert keeper.reference_logprobs(batch) == before
            assert keeper.train_step(batch, Grpo()) == twin.train_step(batch, Grpo())
        assert keeper.reference_logprobs(batch) == before != keeper.logprobs(batch)
        # Whoever looks at the reference finds the policy where it was.
        assert publish(keeper).receipt.checksums == publish(twin).receipt.checksums

    def test_the_reference_survives_a_checkpoint(
        self, start_keeper: Callable[..., KeepsReference], tmp_path: Path
    ) -> None:
        keeper, batch = start_keeper(learning_rate=1e-3), batch_of(sample_rows())
        keeper.freeze_reference()
        expected = keeper.reference_logprobs(batch)
        keeper.train_step(batch, Grpo())
        keeper.save(str(tmp_path))
        resumed = start_keeper(learning_rate=1e-3)
        resumed.load(str(tmp_path))
        assert resumed.reference_logprobs(batch) == expected
        assert resumed.logprobs(batch) == keeper.logprobs(batch) != expected

    def test_the_loss_sees_reference_values_and_returns(self, start: Start) -> None:
        def told(plain: Row, number: float) -> Row:
            numbers = [tuple(x + number if kept else 0.0 for kept in plain.loss_mask) for x in (0.0, 0.25, 0.5)]
            return replace(plain, reference_logprobs=numbers[0], values=numbers[1], returns=numbers[2])

        rows, watching = sample_rows(), Watching()
        start().train_step(batch_of([told(r, float(i)) for i, r in enumerate(rows)], version=7), watching)
        (_, part), *_ = watching.seen
        assert part.version == 7 and part.reference_logprobs is not None
        assert part.old_values is not None and part.returns is not None
        assert (part.old_values - part.reference_logprobs).tolist() == pytest.approx([0.25] * len(part.old_values))
        assert (part.returns - part.old_values).tolist() == pytest.approx([0.25] * len(part.old_values))
        start().train_step(batch_of(rows), watching)
        _, part = watching.seen[-1]
        assert (part.reference_logprobs, part.old_values, part.returns) == (None, None, None)

    def test_rows_of_a_group_are_computed_together_where_they_must(self, start: Start) -> None:
        rows = [replace(r, group=i % 4) for i, r in enumerate(sample_rows())]
        watching = Watching()
        start(micro_batch_tokens=1).train_step(batch_of(rows, whole_groups=True), watching)
        assert len(watching.seen) == 4
        for _, part in watching.seen:
            assert part.group.tolist() == [0] * part.num_sequences and part.computed_groups == 4
        watching.seen.clear()
        start(micro_batch_tokens=10_000).train_step(batch_of(rows), watching)
        # As few micro-batches as there are data ranks; each numbers the groups that it has.
        assert sum(part.num_sequences for _, part in watching.seen) == 13
        for _, part in watching.seen:
            assert 0 not in part.group.bincount().tolist() and part.computed_groups == 4
            assert max(part.group.bincount().tolist()) > 1

    def test_a_preference_is_learned_whatever_the_packing(self, start: Start) -> None:
        pairs = [replace(row([1, 9, 8 + i], [7, 6], 1.0), group=i) for i in range(3)]
        pairs += [replace(row([1, 9, 8 + i], [5, 4, 3], -1.0), group=i) for i in range(3)]
        found: list[list[float]] = []
        for tokens in (10_000, 1):
            backend = start(micro_batch_tokens=tokens, learning_rate=1e-3)
            known = backend.logprobs(batch_of(pairs))
            batch = batch_of(
                (replace(r, reference_logprobs=p) for r, p in zip(pairs, known, strict=True)), whole_groups=True
            )
            stats = [backend.train_step(batch, Dpo()) for _ in range(5)]
            assert stats[0]["preference_margin"] == pytest.approx(0, abs=TOLERANCE)
            assert stats[-1]["preference_accuracy"] == pytest.approx(1)
            assert stats[-1]["loss"] < stats[0]["loss"]
            found.append([step["loss"] for step in stats])
        assert found[0] == pytest.approx(found[1], abs=TOLERANCE)

    def test_a_divergence_from_the_reference_pulls_back(self, start: Start) -> None:
        far = [replace(r, reference_logprobs=tuple(-1.0 * kept for kept in r.loss_mask)) for r in sample_rows()]
        pulled = Grpo(GrpoOptions(kl_coefficient=100.0, kl_estimator="k2"))
        backend = start(learning_rate=3e-3)
        distances = [backend.train_step(batch_of(far), pulled)["reference_kl"] for _ in range(15)]
        assert distances[-1] < distances[0] / 2

    def test_a_new_critic_expects_nothing(self, start_critic: Callable[..., Values]) -> None:
        rows = sample_rows()
        critic = start_critic()
        assert critic.values(batch_of(rows)) == [(0.0,) * len(r.token_ids) for r in rows]

    def test_a_critic_learns_the_returns(self, start_critic: Callable[..., Values]) -> None:
        critic = start_critic(learning_rate=3e-3)
        batch = _judged(sample_rows(), critic)
        losses = [critic.train_step(batch, ValueLoss(None))["loss"] for _ in range(60)]
        assert losses[-1] < 0.2 * losses[0]
        (found, wanted) = critic.values(batch)[0], batch.rows[0].returns
        assert wanted is not None
        assert all(value == 0.0 for value, kept in zip(found, batch.rows[0].loss_mask, strict=True) if not kept)
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 0.5

    def test_a_critics_update_does_not_depend_on_the_packing(self, start_critic: Callable[..., Values]) -> None:
        found: list[list[float]] = []
        for tokens, order in ((10_000, 1), (64, -1), (1, 1)):
            critic = start_critic(learning_rate=1e-3, micro_batch_tokens=tokens)
            batch = _judged(sample_rows()[::order], critic)
            for _ in range(3):
                critic.train_step(batch, ValueLoss(0.2))
            values = critic.values(batch)[::order]
            found.append([number for numbers in values for number in numbers])
        assert max(abs(number) for number in found[0]) > 10 * TOLERANCE
        for others in found[1:]:
            assert others == pytest.approx(found[0], abs=TOLERANCE)

    def test_a_critic_goes_on_from_a_checkpoint(self, start_critic: Callable[..., Values], tmp_path: Path) -> None:
        critic = start_critic(learning_rate=1e-3)
        batch = _judged(sample_rows(), critic)
        critic.train_step(batch, ValueLoss(None))
        critic.save(str(tmp_path))
        expected = critic.train_step(batch, ValueLoss(None))
        restored = start_critic(learning_rate=1e-3)
        restored.load(str(tmp_path))
        assert restored.train_step(batch, ValueLoss(None)) == expected
        assert restored.values(batch) == critic.values(batch)


def _judged(rows: list[Row], critic: Values) -> Batch:
    """Return a batch whose returns are the rows' advantages."""
    values = critic.values(batch_of(rows))
    return batch_of(replace(r, values=v, returns=r.advantages) for r, v in zip(rows, values, strict=True))
