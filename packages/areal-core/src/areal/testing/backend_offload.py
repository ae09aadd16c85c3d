"""The backend kit's cases of giving the device's memory away, for backends that say they can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal.algorithms.grpo import Grpo
from areal.contracts.backend import Backend, KeepsReference, Offloads
from areal.contracts.component import OFFLOAD, Component
from areal.errors import WorkerFailed
from areal.testing.backend_fixtures import BackendFixtures, Published, batch_of, sample_rows

Start = Callable[..., Backend]


class BackendOffload(BackendFixtures):
    """Invariant: a backend gives the same numbers whether its memory was away in between or not."""

    @pytest.fixture
    def start_offloading(self, start: Start, component: Component) -> Start:
        """Return `start` for a backend that offloads; one that has the methods says so, and the other way round."""
        assert isinstance(start(), Offloads) == (OFFLOAD in component.capabilities), "capability or methods missing"
        if OFFLOAD not in component.capabilities:
            pytest.skip("the backend does not declare 'offload'")
        return start

    def test_the_next_updates_are_what_they_would_have_been(
        self, start_offloading: Start, publish: Callable[[Backend], Published]
    ) -> None:
        batches = [batch_of(sample_rows(seed)) for seed in range(3)]
        stays, goes = (start_offloading(learning_rate=1e-3, weight_decay=0.1) for _ in range(2))
        assert isinstance(goes, Offloads)
        for batch in batches:
            goes.offload()
            goes.offload()
            goes.onload()
            goes.onload()
            assert goes.logprobs(batch) == stays.logprobs(batch)
            assert goes.train_step(batch, Grpo()) == stays.train_step(batch, Grpo())
        assert publish(goes).receipt.checksums == publish(stays).receipt.checksums

    def test_the_reference_goes_and_comes_too(self, start_offloading: Start) -> None:
        keeper, batch = start_offloading(learning_rate=1e-3), batch_of(sample_rows())
        if not isinstance(keeper, KeepsReference):
            pytest.skip("the backend keeps no reference")
        assert isinstance(keeper, Offloads)
        keeper.freeze_reference()
        expected = keeper.reference_logprobs(batch)
        keeper.train_step(batch, Grpo())
        keeper.offload()
        keeper.onload()
        assert keeper.reference_logprobs(batch) == expected != keeper.logprobs(batch)

    def test_layout_and_save_need_no_device(self, start_offloading: Start, tmp_path: Path) -> None:
        backend, batch = start_offloading(learning_rate=1e-3), batch_of(sample_rows())
        assert isinstance(backend, Offloads)
        backend.train_step(batch, Grpo())
        layout = backend.layout()
        backend.offload()
        assert backend.layout() == layout
        backend.save(str(tmp_path))
        backend.onload()
        resumed = start_offloading(learning_rate=1e-3)
        resumed.load(str(tmp_path))
        assert resumed.train_step(batch, Grpo()) == backend.train_step(batch, Grpo())

    def test_all_else_is_refused_meanwhile(
        self, start_offloading: Start, publish: Callable[[Backend], Published], tmp_path: Path
    ) -> None:
        backend, batch = start_offloading(), batch_of(sample_rows())
        assert isinstance(backend, Offloads)
        backend.save(str(tmp_path))
        expected = backend.logprobs(batch)
        backend.offload()
        for refused in (
            lambda: backend.logprobs(batch),
            lambda: backend.train_step(batch, Grpo()),
            lambda: backend.load(str(tmp_path)),
            lambda: publish(backend),
        ):
            with pytest.raises(WorkerFailed, match="onload") as caught:
                refused()
            assert "\n" not in str(caught.value)
        backend.onload()
        assert backend.logprobs(batch) == expected
