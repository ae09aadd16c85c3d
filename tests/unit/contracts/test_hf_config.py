"""What is read of a model's config.json before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.contracts.hf_config import NUM_EXPERTS, hf_config, size_of


def test_what_is_said_of_the_text_model_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "a": 2, "text_config": {"vocab_size": 3}}')
    said = hf_config(str(tmp_path))
    assert said is not None and (said["vocab_size"], said["a"]) == (3, 2)


@pytest.mark.parametrize("text", ["", "[1]", '"text"', "3", '{"text_config": 3}'])
def test_what_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert hf_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(text)
    assert hf_config(str(tmp_path)) is None


def test_a_size_is_the_first_whole_number() -> None:
    assert size_of({"num_experts": 0, "num_local_experts": 8, "n_routed_experts": 4}, *NUM_EXPERTS) == 8
    assert size_of({"num_experts": [8, 8]}, *NUM_EXPERTS) == 0
