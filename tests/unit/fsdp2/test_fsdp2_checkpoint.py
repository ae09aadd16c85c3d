"""Checkpoints: read by any mesh, written beside training, refused in one sentence when they cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsdp2_trainers import BATCHES, Trainers, context_of, counts_of, held_by
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from areal.algorithms.grpo import Grpo
from areal.builtins.torch_backend.backend import TorchBackend
from areal.contracts.specs import AmpSpec
from areal.errors import ConfigError, JournalError
from areal.flow.trainer.checksums import check, seal
from areal.testing.backend_training import Watching
from areal.testing.models import family_model, tiny_model
from areal.testing.ranks import RankDied
from areal_fsdp2.backend import Fsdp2Backend

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def one(model_path: str) -> Iterator[Fsdp2Backend]:
    """The backend on one rank, in this process."""
    backend = Fsdp2Backend(None, context_of(model_path, 1))
    backend.start()
    yield backend
    backend.close()


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
    weights = trainer.published()
    trainer.do("save", str(tmp_path))
    assert not (tmp_path / "trainer").exists() and not (tmp_path / "model").exists()
    expected = trainer.steps(BATCHES[1:3])
    trainer.do("finish_save")
    trainer.do("finish_save")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "trainer"]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)
    resumed = two.start(model_path)
    resumed.do("load", str(tmp_path))
    assert resumed.steps(BATCHES[1:3]) == expected


def test_a_dynamic_loss_scale_goes_on_where_it_was(two: Trainers, model_path: str, tmp_path: Path) -> None:
    amp = AmpSpec(enabled=True, dtype="fp16")
    trainer, overflow = two.start(model_path, amp=amp), Watching(float("inf"))
    for loss in (overflow, overflow, Grpo(), Grpo(), overflow, Grpo(), Grpo()):
        trainer.do("train_step", BATCHES[0], loss)
    saved = trainer.each("counts")[0]
    assert saved["num_updates"] == 7 and saved["num_good"] == 2
    # An update that was skipped halves the scale, and Adam does not count it.
    (num_taken,) = saved["steps"]
    assert num_taken <= 4 and saved["value"] == 2.0**16 / 2 ** (7 - num_taken)
    trainer.save(tmp_path)
    again = two.start(model_path, amp=amp)
    again.do("load", str(tmp_path))
    alone = Fsdp2Backend(None, context_of(model_path, 1, amp=amp))
    alone.start()
    try:
        alone.load(str(tmp_path))
        assert [*again.each("counts"), counts_of(alone)] == [saved] * 3
        for loss in (Grpo(), overflow, Grpo()):
            expected = trainer.do("train_step", BATCHES[1], loss)
            assert again.do("train_step", BATCHES[1], loss) == pytest.approx(expected, nan_ok=True, rel=0, abs=0)
            found = alone.train_step(BATCHES[1], loss)
            assert found["skipped"] == expected["skipped"]
            assert found["learning_rate"] == expected["learning_rate"]
        assert [*again.each("counts"), counts_of(alone)] == trainer.each("counts") + trainer.each("counts")[:1]
        assert counts_of(alone)["num_good"] == 1
    finally:
        alone.close()


@pytest.mark.parametrize("lost", [1, 0])
def test_a_rank_that_is_killed_while_a_checkpoint_is_written_is_named(
    one: Fsdp2Backend, model_path: str, tmp_path: Path, lost: int
) -> None:
    three = Trainers(3)
    try:
        trainer = three.start(model_path, step_timeout_s=60.0)
        trainer.steps(BATCHES[:1])
        before = held_by(one, trainer.save(tmp_path))
        trainer.steps(BATCHES[1:2])
        outcomes = three.ranks.outcomes("save_without", trainer.number, str(tmp_path), lost)
    finally:
        three.ranks.close()
    assert isinstance(outcomes.pop(lost), RankDied)
    for said, seconds in outcomes:
        assert said.startswith(f"trainer rank {lost} was lost while the checkpoint {str(tmp_path)!r} was written")
        assert "\n" not in said and seconds < 60
    after = held_by(one, tmp_path)
    assert after.keys() == before.keys() and all(torch.equal(after[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_run_grows_from_the_backend_torch(two: Trainers, model_path: str, tmp_path: Path, kind: str) -> None:
    if kind == "experts":
        model_path = family_model(tmp_path / "experts", "qwen3_moe")  # one by one in files, stacked in the module
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

    @pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq", "rest.pt", ".metadata", "model.safetensors"])
    @pytest.mark.parametrize("what", ["missing", "cut short", "changed"])
    def test_a_seal_shows_any_damage_to_one_rank(self, saved: Path, tmp_path: Path, part: str, what: str) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(saved, folder)
        seal(folder)
        file, place = place_of(folder, part)
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.unlink()
        if what != "missing":
            file.write_bytes(content if what == "changed" else content[:place])
        said: list[str] = []
        for rank in range(2):
            try:
                check(folder, rank, 2)
            except JournalError as error:
                said.append(str(error))
        (problem,) = said
        assert f"is damaged: {file.relative_to(folder)} is not what was saved" in problem and "\n" not in problem

    def test_no_checkpoint_at_all(self, two: Trainers, model_path: str, tmp_path: Path) -> None:
        with pytest.raises(JournalError, match=r"not a checkpoint of the backend 'fsdp2': it has no trainer/rest.pt"):
            two.start(model_path).do("load", str(tmp_path))

    def test_another_model(self, two: Trainers, saved: Path, tmp_path: Path) -> None:
        other = two.start(tiny_model(tmp_path, hidden=128, layers=3))
        with pytest.raises(ConfigError, match=r"has no tensor model\.layers\.2\..*set model\.path back") as caught:
            other.do("load", str(saved))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"PK", b"half a file"])
    def test_a_damaged_file_of_the_backend_torch(
        self, two: Trainers, model_path: str, tmp_path: Path, content: bytes
    ) -> None:
        (tmp_path / "trainer.pt").write_bytes(content)
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


def place_of(folder: Path, part: str) -> tuple[Path, int]:
    """Return the file of a checkpoint that holds some kind of tensors, and a byte of one of them; or a file by name."""
    found = [path for path in folder.rglob(part) if path.is_file()]
    if found:
        return found[0], found[0].stat().st_size // 2
    stored = FileSystemReader(folder / "trainer").read_metadata().storage_data
    assert stored is not None
    index = next(index for index in stored if index.fqn.startswith(f"{part}/"))
    return folder / "trainer" / stored[index].relative_path, stored[index].offset + stored[index].length // 2
