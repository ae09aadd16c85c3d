"""What the builtin backend does beyond the conformance kit: its refusals, its files, its senders."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from areal.algorithms.sft import Sft
from areal.algorithms.update.state import load_state
from areal.builtins.torch_backend.backend import TorchBackend
from areal.builtins.torch_backend.options import TorchBackendOptions
from areal.contracts.component import Component
from areal.contracts.specs import BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal.contracts.transfer import Layout, Plan, Receipt, Transfer
from areal.errors import ConfigError, JournalError, WorkerFailed
from areal.testing.backend_fixtures import batch_of, row, sample_rows
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def started(path: str, dtype: Any = "float32", **training: Any) -> TorchBackend:
    backend = TorchBackend(None, context(path, dtype, **training))
    backend.start()
    return backend


def context(path: str, dtype: Any = "float32", **training: Any) -> BackendContext:
    return BackendContext(
        model=ModelSpec(path=path, dtype=dtype), training=TrainingSpec(**training), accelerator=HostCpu(), seed=0
    )


def test_several_ranks_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="2 were asked for; use backend fsdp2"):
        TorchBackend(None, replace(context(path), devices=TrainerDevices(world_size=2)))


def test_nothing_works_before_start(path: str) -> None:
    backend, batch = TorchBackend(None, context(path)), batch_of(sample_rows())
    for call in (lambda: backend.logprobs(batch), lambda: backend.train_step(batch, Sft()), backend.layout):
        with pytest.raises(WorkerFailed, match="call start first"):
            call()


def test_options_are_checked() -> None:
    for table in ({"adam_eps": -1}, {"adam_epsilon": 1e-8}):
        with pytest.raises(ValidationError):
            TorchBackendOptions.model_validate(table)


def test_row_order_and_mixed_proximal_logprobs_keep_their_tokens(path: str) -> None:
    """Rows are sorted for packing; every number must stay with its row."""
    backend = started(path)
    rows = [row([9 - i, 4], [3 + i, 5], advantage=float(i), logprob=-float(i)) for i in range(6)]
    rows[2] = rows[2].with_proximal((0.0, 0.0, -7.0, -8.0))
    logprobs = backend.logprobs(batch_of(rows))

    class Look(Sft):
        def loss(self, logprobs: Tensor, batch: Any) -> Any:
            self.columns = [
                logprobs.tolist(),
                batch.advantages.tolist(),
                batch.behavior_logprobs.tolist(),
                batch.proximal_logprobs.tolist(),
            ]
            return super().loss(logprobs, batch)

    look = Look()
    backend.train_step(batch_of(rows), look)
    found = sorted(zip(*look.columns, strict=True), key=lambda token: token[1])
    for i in range(6):
        for k, token in enumerate(found[2 * i : 2 * i + 2]):
            current = logprobs[i][2 + k]
            proximal = -7.0 - k if i == 2 else current
            assert token == pytest.approx((current, float(i), -float(i), proximal), abs=1e-6)


def test_a_checkpoint_is_an_hf_folder_in_the_engines_dtype_beside_the_exact_state(path: str, tmp_path: Path) -> None:
    backend = started(path, "bfloat16", learning_rate=1e-3)
    backend.train_step(batch_of(sample_rows()), Sft())
    backend.save(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "trainer.pt"]
    files = {p.name for p in (tmp_path / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    exact = torch.load(tmp_path / "trainer.pt", weights_only=True)["weights"]
    written = load_file(tmp_path / "model/model.safetensors")
    # A tied head is written once.
    assert written.keys() == exact.keys()
    for name, tensor in written.items():
        assert exact[name].dtype == torch.float32
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))


def test_loading_and_saving_say_nothing(path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started(path).save(str(tmp_path))
    assert capfd.readouterr() == ("", "")


def test_random_numbers_go_on_after_a_load(path: str, tmp_path: Path) -> None:
    backend = started(path)
    backend.save(str(tmp_path))
    expected = torch.rand(3)
    backend.load(str(tmp_path))
    assert torch.equal(torch.rand(3), expected)


def test_a_write_that_is_interrupted_leaves_the_old_checkpoint(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, batch = started(path, learning_rate=1e-3), batch_of(sample_rows())
    backend.save(str(tmp_path))
    before = backend.logprobs(batch)
    backend.train_step(batch, Sft())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        backend.save(str(tmp_path))
    fresh = started(path)
    fresh.load(str(tmp_path))
    assert fresh.logprobs(batch) == before
    assert started(str(tmp_path / "model")).logprobs(batch) == before


def test_a_folder_without_tokenizer_is_trained_and_saved(path: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes(Path(path, name).read_bytes())
    backend = started(str(bare))
    backend.save(str(tmp_path / "out"))
    assert not (tmp_path / "out/model/tokenizer.json").exists()
    assert started(str(tmp_path / "out/model")).layout().tensors == backend.layout().tensors


def test_checkpoints_that_cannot_be_used_are_refused(path: str, tmp_path: Path) -> None:
    backend = started(path)
    with pytest.raises(JournalError, match=r"has no trainer\.pt"):
        backend.load(str(tmp_path))
    for content in (b"", b"PK", b"half a file"):
        (tmp_path / "trainer.pt").write_bytes(content)
        with pytest.raises(JournalError, match="is damaged") as caught:
            backend.load(str(tmp_path))
        assert "\n" not in str(caught.value)
    started(tiny_model(tmp_path / "other", layers=1)).save(str(tmp_path))
    with pytest.raises(ConfigError, match="holds another model"):
        backend.load(str(tmp_path))


def test_states_hold_nothing_that_runs_code(path: str, tmp_path: Path) -> None:
    started(path).save(str(tmp_path))
    saved = load_state(tmp_path, "trainer.pt", "torch")
    assert set(saved) == {"weights", "optimizer", "num_updates", "random", "reference"}
    (tmp_path / "trainer.pt").write_bytes(pickle.dumps(Path))
    with pytest.raises(JournalError):
        load_state(tmp_path, "trainer.pt", "torch")


class NotedSender:
    """Invariant: writes down what happens to it."""

    events: list[str] = []  # noqa: RUF012 - the test reads it

    def __init__(self, uid: str) -> None:
        self.uid = uid

    def send(self, version: int, tensors: Iterable[tuple[str, Tensor]], deadline_s: float) -> Receipt:
        names = [name for name, tensor in tensors if not tensor.requires_grad]
        self.events.append(f"{self.uid} sends {version}, {len(names)} tensors, {deadline_s} s")
        return Receipt(version=version, checksums=dict.fromkeys(names, 0))

    def close(self) -> None:
        self.events.append(f"{self.uid} closes")


class NotedResharder:
    def __init__(self, options: Any, run_dir: str) -> None:
        assert (options, run_dir) == ("its options", "")

    def plan(self, source: Layout, targets: Sequence[Layout]) -> Plan:
        return Plan(uid="", source=source, targets=tuple(targets))

    def sender(self, plan: Plan, rank: int = 0) -> NotedSender:
        return NotedSender(plan.uid)


def test_a_sender_serves_one_plan_until_the_next_plan_comes(path: str) -> None:
    backend = started(path)
    layout = backend.layout()
    for version, uid in enumerate(("a", "a", "b"), start=1):
        transfer = Transfer(
            phase="stage",
            version=version,
            resharder=Component(name="noted", factory=f"{__name__}:NotedResharder"),
            options="its options",
            plan=Plan(uid=uid, source=layout, targets=(layout,)),
            deadline_s=9.0,
        )
        assert list(backend.send(transfer).checksums) == [spec.name for spec in layout.tensors]
    backend.close()
    backend.close()
    size = len(layout.tensors)
    assert NotedSender.events == [
        f"a sends 1, {size} tensors, 9.0 s",
        f"a sends 2, {size} tensors, 9.0 s",
        "a closes",
        f"b sends 3, {size} tensors, 9.0 s",
        "b closes",
    ]
