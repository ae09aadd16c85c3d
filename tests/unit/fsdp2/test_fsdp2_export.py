"""The Hugging Face folder: written by all ranks, each its own files, from pieces cut in any way."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_trainers import BATCHES, Trainers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.builtins.transformers_engine.loading import load_model
from areal.contracts.specs import ModelSpec
from areal.contracts.transfer import Piece, TensorSpec
from areal.testing.backend_fixtures import truth
from areal.testing.models import tiny_model
from areal_fsdp2.export import File, _write_file, files_of, num_bytes

pytestmark = pytest.mark.timeout(300)


@st.composite
def cut_tensors(draw: Any) -> list[tuple[Tensor, list[Piece]]]:
    """Tensors of 0 to 3 dimensions, cut into boxes as sharding over two meshes would, in any order."""
    found: list[tuple[Tensor, list[Piece]]] = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * len(shape), shape)]
        for axis in draw(st.lists(st.sampled_from(range(len(shape))), max_size=3)) if shape else []:
            boxes = [half for start, size in boxes for half in _halves(start, size, axis)]
        pieces = [Piece(tensor=index, start=start, shape=size) for start, size in boxes]
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        found.append((numbers, draw(st.permutations(pieces))))
    return found


def _halves(start: tuple[int, ...], size: tuple[int, ...], axis: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    first = -(-size[axis] // 2)
    if first == size[axis]:
        return [(start, size)]
    return [
        (start, (*size[:axis], first, *size[axis + 1 :])),
        (
            (*start[:axis], start[axis] + first, *start[axis + 1 :]),
            (*size[:axis], size[axis] - first, *size[axis + 1 :]),
        ),
    ]


@given(cut_tensors(), st.sampled_from(["float32", "bfloat16"]))
def test_pieces_make_up_the_tensors(tensors: list[tuple[Tensor, list[Piece]]], dtype: str) -> None:
    specs = [TensorSpec(name=f"t{i}", shape=tuple(whole.shape), dtype=dtype) for i, (whole, _) in enumerate(tensors)]
    cast = [whole.to(getattr(torch, dtype)) for whole, _ in tensors]
    pieces = [(piece, cast[piece.tensor][piece.box].contiguous()) for _, cut in tensors for piece in cut]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        _write_file(path, specs, range(len(specs)), iter(pieces))
        found = load_file(path)
    assert found.keys() == {spec.name for spec in specs}
    assert all(torch.equal(found[spec.name], whole) for spec, whole in zip(specs, cast, strict=True))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 400))
def test_files_hold_each_tensor_once_and_as_much_as_they_may(sizes: list[int], max_bytes: int) -> None:
    specs = [TensorSpec(name=f"t{i}", shape=(size,), dtype="bfloat16") for i, size in enumerate(sizes)]
    files: list[File] = files_of(specs, "model", max_bytes)
    assert [index for file in files for index in file.tensors] == list(range(len(sizes)))
    for file, after in zip(files, [*files[1:], None], strict=True):
        size = sum(num_bytes(specs[index]) for index in file.tensors)
        assert size <= max_bytes or len(file.tensors) == 1
        assert after is None or size + num_bytes(specs[after.tensors[0]]) > max_bytes
    assert len({file.name for file in files}) == len(files)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_several_files_is_a_model_like_any_other(
    two: Trainers, four: Trainers, tmp_path: Path, tied: bool
) -> None:
    path = tiny_model(tmp_path / "base", hidden=128, tied=tied)
    for trainers, options in ((two, {}), (four, {"tp": 2})):
        trainer = trainers.start(path, options)
        trainer.steps(BATCHES[:1])
        saved = tmp_path / f"of-{trainers.num_ranks}"
        writers = trainer.each("export", str(saved), 60_000)
        index = json.loads((saved / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = {file.name for file in saved.glob("*.safetensors")}
        assert names == set(index["weight_map"].values()) and len(names) > 4
        assert ("lm_head.weight" in index["weight_map"]) != tied
        stored = [tensor for name in names for tensor in load_file(saved / name).values()]
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)
        assert all(writers) and set().union(*writers) == names and sum(map(len, writers)) == len(names)
        for mine, theirs in zip(trainer.do("logprobs", BATCHES[0]), truth(str(saved), BATCHES[0]), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4, rel=0)


def test_the_saved_model_has_the_models_dtype_and_loads_in_the_engine(
    two: Trainers, model_path: str, tmp_path: Path
) -> None:
    trainer = two.start(model_path, dtype="bfloat16")
    trainer.steps(BATCHES[:1])
    saved = trainer.save(tmp_path) / "model"
    weights = load_file(saved / "model.safetensors")
    published = trainer.published()
    assert published.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, published[name].to(torch.bfloat16))
    module = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    assert module.dtype == torch.bfloat16
    assert sum(trainer.each("own_sizes")) == sum(tensor.numel() for tensor in weights.values())
    assert max(trainer.each("own_sizes")) < 0.6 * sum(trainer.each("own_sizes"))
    engines = load_model(ModelSpec(path=str(saved), dtype="bfloat16"), "cpu", "sdpa")
    assert all(torch.equal(parameter, weights[name]) for name, parameter in engines.named_parameters())
