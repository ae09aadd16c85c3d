"""Checkpoints: read by any mesh, written beside training, refused in one sentence when they cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsdp2_trainers import BATCHES, Trainers, context_of

from areal.algorithms.grpo import Grpo
from areal.builtins.torch_backend.backend import TorchBackend
from areal.errors import ConfigError, JournalError
from areal.testing.models import tiny_model
from areal_fsdp2.backend import Fsdp2Backend

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def one(model_path: str) -> Iterator[Fsdp2Backend]:
    """The backend on one rank, in this process."""
    backend = Fsdp2Backend(None, context_of(model_path, 1))
    backend.start()
    yield backend
    backend.close()


def held_by(backend: Fsdp2Backend, path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, as one rank reads it."""
    backend.load(str(path))
    return {f"{kind}/{part.name}": part.view.clone() for kind, parts in backend._kinds().items() for part in parts}


def test_a_run_goes_on_on_2_then_4_then_1_ranks_and_on_other_meshes(
    two: Trainers, four: Trainers, one: Fsdp2Backend, model_path: str, tmp_path: Path
) -> None:
    straight = two.start(model_path)
    straight.do("freeze_reference")
    straight.steps(BATCHES[:2])
    straight.save(tmp_path / "two")
    expected = straight.steps(BATCHES[2:])
    reference = straight.do("reference_logprobs", BATCHES[0])

    first = held_by(one, tmp_path / "two")
    assert {key.split("/")[0] for key in first} == {"weights", "exp_avg", "exp_avg_sq", "reference"}
    found = []
    for number, options in enumerate(({"replicate": 2}, {"tp": 2})):
        grown = four.start(model_path, options)
        grown.do("load", str(tmp_path / ("two" if number == 0 else "four-0")))
        if number == 0:  # not a bit is lost on the way
            same = held_by(one, grown.save(tmp_path / "same"))
            assert same.keys() == first.keys()
            assert all(torch.equal(same[key], tensor) for key, tensor in first.items())
        found += grown.steps(BATCHES[2 + number : 3 + number])
        grown.save(tmp_path / f"four-{number}")
    one.load(str(tmp_path / "four-1"))
    found += [one.train_step(batch, Grpo()) for batch in BATCHES[4:]]

    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5, rel=1e-4)
    assert [step["learning_rate"] for step in found] == [step["learning_rate"] for step in expected]
    for mine, theirs in zip(one.reference_logprobs(BATCHES[0]), reference, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_training_goes_on_while_a_checkpoint_is_written(two: Trainers, model_path: str, tmp_path: Path) -> None:
    trainer = two.start(model_path)
    trainer.steps(BATCHES[:1])
    trainer.do("save", str(tmp_path))
    assert not (tmp_path / "trainer").exists() and not (tmp_path / "model").exists()
    expected = trainer.steps(BATCHES[1:3])
    trainer.do("finish_save")
    trainer.do("finish_save")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "trainer"]
    resumed = two.start(model_path)
    resumed.do("load", str(tmp_path))
    assert resumed.steps(BATCHES[1:3]) == expected


def test_a_run_grows_from_the_backend_torch(two: Trainers, model_path: str, tmp_path: Path) -> None:
    small = TorchBackend(None, context_of(model_path, 1))
    small.start()
    small.freeze_reference()
    for batch in BATCHES[:2]:
        small.train_step(batch, Grpo())
    small.save(str(tmp_path))
    grown = two.start(model_path)
    grown.do("load", str(tmp_path))
    for mine, theirs in zip(
        grown.do("reference_logprobs", BATCHES[0]), small.reference_logprobs(BATCHES[0]), strict=True
    ):
        assert mine == pytest.approx(theirs, abs=1e-5)
    expected = [small.train_step(batch, Grpo()) for batch in BATCHES[2:4]]
    for mine, theirs in zip(grown.steps(BATCHES[2:4]), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5, rel=1e-4)


def test_weights_and_moments_in_the_hosts_memory_change_no_number(
    two: Trainers, model_path: str, tmp_path: Path
) -> None:
    stays, goes = two.start(model_path), two.start(model_path, {"cpu_offload": True})
    assert goes.steps(BATCHES[:2]) == stays.steps(BATCHES[:2])
    goes.save(tmp_path)
    resumed = two.start(model_path, {"cpu_offload": True})
    resumed.do("load", str(tmp_path))
    assert resumed.steps(BATCHES[2:3]) == stays.steps(BATCHES[2:3])


class TestWhatCannotBeUsed:
    """Each is one sentence on every rank, and the ranks go on."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, two: Trainers, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        trainer = two.start(model_path)
        trainer.steps(BATCHES[:1])
        return trainer.save(tmp_path_factory.mktemp("saved"))

    @pytest.mark.parametrize("name", ["rest.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"])
    @pytest.mark.parametrize("what", ["missing", "cut short"])
    def test_a_file(self, two: Trainers, model_path: str, saved: Path, tmp_path: Path, name: str, what: str) -> None:
        shutil.copytree(saved, tmp_path / "copy")
        file = tmp_path / "copy" / "trainer" / name
        if what == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        trainer = two.start(model_path)
        with pytest.raises(JournalError) as caught:
            trainer.do("load", str(tmp_path / "copy"))
        assert str(tmp_path / "copy") in str(caught.value) and "\n" not in str(caught.value)
        assert name in str(caught.value) or "damaged" in str(caught.value)
        trainer.do("load", str(saved))

    def test_no_checkpoint_at_all(self, two: Trainers, model_path: str, tmp_path: Path) -> None:
        with pytest.raises(JournalError, match=r"not a checkpoint of the backend 'fsdp2': it has no trainer/rest.pt"):
            two.start(model_path).do("load", str(tmp_path))

    def test_another_model(self, two: Trainers, saved: Path, tmp_path: Path) -> None:
        other = two.start(tiny_model(tmp_path, hidden=128, layers=3))
        with pytest.raises(ConfigError, match=r"holds another model than") as caught:
            other.do("load", str(saved))
        assert "\n" not in str(caught.value)

    def test_a_damaged_file_of_the_backend_torch(self, two: Trainers, model_path: str, tmp_path: Path) -> None:
        (tmp_path / "trainer.pt").write_bytes(b"PK")
        with pytest.raises(JournalError, match="damaged"):
            two.start(model_path).do("load", str(tmp_path))

    def test_a_place_that_cannot_be_written(self, two: Trainers, model_path: str, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        trainer = two.start(model_path)
        with pytest.raises(JournalError, match="rank 0 cannot write") as caught:
            trainer.do("save", str(tmp_path / "file" / "checkpoint"))
        assert "\n" not in str(caught.value)
        trainer.save(tmp_path / "good")

    def test_a_place_that_is_gone_when_files_are_written(
        self, two: Trainers, model_path: str, saved: Path, tmp_path: Path
    ) -> None:
        trainer = two.start(model_path)
        trainer.save(tmp_path)
        trainer.do("save", str(tmp_path))
        shutil.rmtree(tmp_path / ".model.new")
        with pytest.raises(JournalError, match="cannot write"):
            trainer.do("finish_save")
        trainer.do("load", str(tmp_path))  # the one before stays
        trainer.save(tmp_path)
