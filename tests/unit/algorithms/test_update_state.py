"""The state that backends keep in a file of their own, and what is said when it cannot be used."""

from __future__ import annotations

from errno import ENOSPC
from pathlib import Path

import pytest
import torch

from areal.algorithms.update.state import load_state, load_tokenizer, save_state
from areal.errors import JournalError
from areal.testing.models import character_tokenizer

STATE = {"weights": {"a": torch.arange(300.0)}, "num_updates": 7, "scale": {}}


@pytest.mark.parametrize("is_mapped", [False, True])
def test_what_was_saved_is_loaded(tmp_path: Path, is_mapped: bool) -> None:
    save_state(STATE, tmp_path / "state.pt")
    found = load_state(tmp_path, "state.pt", "mine", is_mapped=is_mapped)
    assert torch.equal(found["weights"]["a"], STATE["weights"]["a"])
    assert (found["num_updates"], found["scale"]) == (7, {})
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_file_cut_short_anywhere_is_damaged(tmp_path: Path, is_mapped: bool) -> None:
    file = tmp_path / "state.pt"
    save_state(STATE, file)
    content = file.read_bytes()
    for size in [*range(8), *range(8, len(content), 61), len(content) - 1]:
        file.write_bytes(content[:size])
        with pytest.raises(
            JournalError, match=r"state\.pt' is damaged \(.*; go on from an older checkpoint$"
        ) as caught:
            load_state(tmp_path, "state.pt", "mine", is_mapped=is_mapped)
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        JournalError, match=r"not a checkpoint of the backend 'mine': it has no in/state\.pt; put"
    ) as caught:
        load_state(tmp_path, "in/state.pt", "mine")
    assert str(caught.value).startswith(repr(str(tmp_path)))


def test_a_full_disk_is_said_and_the_file_before_stays(tmp_path: Path) -> None:
    save_state(STATE, tmp_path / "state.pt")
    (tmp_path / "state.pt.tmp").symlink_to("/dev/full")
    for size in (1, 10_000_000):
        with pytest.raises(OSError) as caught:
            save_state({"weights": torch.zeros(size)}, tmp_path / "state.pt")
        assert caught.value.errno == ENOSPC
    assert load_state(tmp_path, "state.pt", "mine")["num_updates"] == 7


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    assert load_tokenizer(tmp_path) is None
    character_tokenizer().save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert found is not None and found("12").input_ids == character_tokenizer()("12").input_ids
