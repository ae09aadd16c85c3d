"""The conformance kit of training backends.

    class TestMine(BackendConformance):
        @pytest.fixture
        def component(self) -> Component:
            return Component(name="mine", factory="my_package.mine:Mine")

The kit trains tiny float32 models with one rank, or with several (`areal.testing.backend_ranks.OnRanks`), and compares
with transformers, row by row. Give `backend_factory` instead of `component` when a backend needs more than its options
and a `BackendContext`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.algorithms.grpo import Grpo
from areal.algorithms.sft import Sft
from areal.contracts.backend import Backend, SendsInBackground
from areal.contracts.transfer import checksum
from areal.errors import ArealError, WorkerFailed
from areal.testing.backend_fixtures import Published, batch_of, sample_rows, truth
from areal.testing.backend_offload import BackendOffload
from areal.testing.backend_roles import BackendRoles
from areal.testing.backend_training import BackendTraining
from areal.testing.models import tiny_model, tiny_module


class BackendConformance(BackendOffload, BackendRoles, BackendTraining):
    """Subclass it, give `component`, and `options` when there are any.

    Invariant: a case passes for every backend that keeps the contract; none looks inside one.
    """

    def test_it_is_a_backend(self, start: Callable[..., Backend]) -> None:
        assert isinstance(start(), Backend)

    def test_a_missing_model_is_refused_in_one_sentence(self, start: Callable[..., Backend], tmp_path: Path) -> None:
        with pytest.raises(WorkerFailed, match="nothing-here") as caught:
            start(str(tmp_path / "nothing-here"))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_layout_names_every_parameter_once(
        self, start: Callable[..., Backend], tmp_path: Path, tied: bool
    ) -> None:
        layout = start(tiny_model(tmp_path, tied=tied, hidden=self.hidden), dtype="bfloat16").layout()
        expected = {name: tuple(p.shape) for name, p in tiny_module(tied=tied, hidden=self.hidden).named_parameters()}
        assert {spec.name: spec.shape for spec in layout.tensors} == expected
        assert len(layout.tensors) == len(expected)
        assert {spec.dtype for spec in layout.tensors} | {layout.dtype} == {"bfloat16"}
        assert layout.host

    def test_what_is_sent_are_the_current_weights(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], model_path: str
    ) -> None:
        backend = start(learning_rate=1e-3)
        first = publish(backend)
        original = dict(tiny_module(vocab=64, hidden=self.hidden).named_parameters())
        assert {name: checksum(tensor) for name, tensor in original.items()} == first.receipt.checksums
        backend.train_step(batch_of(sample_rows()), Sft())
        second = publish(backend)
        assert [spec.name for spec in second.layout.tensors] == list(second.receipt.checksums)
        assert {name: checksum(tensor) for name, tensor in second.tensors.items()} == second.receipt.checksums
        assert all(second.receipt.checksums[name] != first.receipt.checksums[name] for name in original)

    def test_training_beside_a_send_does_not_change_what_is_sent(
        self, start: Callable[..., Backend], publish: Callable[..., Published]
    ) -> None:
        backend = start(learning_rate=1e-3)
        if not isinstance(backend, SendsInBackground):
            pytest.skip("the backend sends in one go")
        first = publish(backend)
        beside = publish(backend, lambda: backend.train_step(batch_of(sample_rows()), Sft()))
        assert beside.receipt.checksums == first.receipt.checksums
        assert {name: checksum(tensor) for name, tensor in beside.tensors.items()} == first.receipt.checksums
        assert all(
            publish(backend).receipt.checksums[name] != number for name, number in first.receipt.checksums.items()
        )

    def test_the_saved_folder_loads_with_transformers(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], tmp_path: Path, model_path: str
    ) -> None:
        from transformers import AutoTokenizer

        backend, batch = start(learning_rate=1e-3), batch_of(sample_rows())
        backend.train_step(batch, Sft())
        backend.save(str(tmp_path))
        saved = str(tmp_path / "model")
        for mine, theirs in zip(backend.logprobs(batch), truth(saved, batch), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4, rel=0)
        tokenizers = [AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (model_path, saved)]
        assert tokenizers[0]("12 + 3").input_ids == tokenizers[1]("12 + 3").input_ids
        # The saved folder is a model like any other.
        again = start(saved)
        assert publish(again).receipt.checksums == publish(backend).receipt.checksums

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_training_goes_on_from_a_checkpoint_bit_for_bit(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], tmp_path: Path, dtype: str
    ) -> None:
        numbers: dict[str, Any] = {"learning_rate": 1e-3, "schedule": "cosine", "max_steps": 8, "weight_decay": 0.1}
        straight = start(dtype=dtype, **numbers)
        batches = [batch_of(sample_rows(seed)) for seed in range(6)]
        for batch in batches[:3]:
            straight.train_step(batch, Grpo())
        straight.save(str(tmp_path))
        # What comes after the save must not reach the checkpoint.
        expected = [straight.train_step(batch, Grpo()) for batch in batches[3:]]
        resumed = start(dtype=dtype, **numbers)
        resumed.train_step(batches[5], Sft())
        resumed.load(str(tmp_path))
        assert [resumed.train_step(batch, Grpo()) for batch in batches[3:]] == expected
        assert publish(resumed).receipt.checksums == publish(straight).receipt.checksums
        assert resumed.logprobs(batches[0]) == straight.logprobs(batches[0])

    def test_a_checkpoint_is_replaced_by_the_next(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], tmp_path: Path
    ) -> None:
        backend = start(learning_rate=1e-3)
        for seed in range(2):
            backend.train_step(batch_of(sample_rows(seed)), Sft())
            backend.save(str(tmp_path))
        loaded = start()
        loaded.load(str(tmp_path))
        assert publish(loaded).receipt.checksums == publish(backend).receipt.checksums
        assert publish(start(str(tmp_path / "model"))).receipt.checksums == publish(backend).receipt.checksums

    def test_a_folder_without_checkpoint_is_refused(self, start: Callable[..., Backend], tmp_path: Path) -> None:
        backend = start()
        with pytest.raises(ArealError, match=tmp_path.name) as caught:
            backend.load(str(tmp_path))
        assert "\n" not in str(caught.value)

    def test_rates_follow_the_schedule_unless_one_is_given(self, start: Callable[..., Backend]) -> None:
        backend = start(learning_rate=1e-3, schedule="linear", min_lr_ratio=0.0, max_steps=5, lr_warmup_steps=2)
        batch = batch_of(sample_rows(num_prompts=1))
        given = [backend.train_step(batch, Sft(), 7e-4)["learning_rate"] for _ in range(3)]
        assert given == pytest.approx([7e-4] * 3)
        rates = [backend.train_step(batch, Sft())["learning_rate"] for _ in range(6)]
        assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 0.0, 0.0], abs=1e-9)

    @pytest.mark.parametrize("amp", [("bf16", "dynamic"), ("fp16", "dynamic"), ("fp16", 1024.0)])
    def test_mixed_precision_learns_and_keeps_float32_weights(
        self, start: Callable[..., Backend], publish: Callable[[Backend], Published], amp: Any
    ) -> None:
        from areal.contracts.specs import AmpSpec

        dtype, scale = amp
        exact, batch = start(), batch_of(sample_rows())
        mixed = start(learning_rate=1e-4, amp=AmpSpec(enabled=True, dtype=dtype, loss_scale=scale))
        norm = exact.train_step(batch, Sft())["grad_norm"]
        stats = [mixed.train_step(batch, Sft()) for _ in range(12)]
        taken = [step for step in stats if not step["skipped"]]
        assert len(taken) >= 6, "too many updates were skipped"
        # The norm is that of the gradient itself, without the loss scale.
        assert taken[0]["grad_norm"] == pytest.approx(norm, rel=0.05)
        assert taken[-1]["loss"] < taken[0]["loss"]
        assert {str(tensor.dtype) for tensor in publish(mixed).tensors.values()} == {"torch.float32"}

    def test_activation_checkpointing_changes_nothing(self, start: Callable[..., Backend]) -> None:
        batch = batch_of(sample_rows())
        plain, checkpointing = (start(activation_checkpointing=on) for on in (False, True))
        for _ in range(2):
            expected = plain.train_step(batch, Grpo())
            assert checkpointing.train_step(batch, Grpo()) == pytest.approx(expected, rel=1e-4, abs=1e-6)
