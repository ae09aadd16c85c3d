"""A checkpoint's tensors within a module's parameters, compared with the files that transformers writes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from areal.algorithms.update.regions import checkpoint_tensors, regions
from areal.testing.models import family_module, tiny_module


def test_stacked_experts_are_those_of_the_files(tmp_path: Path) -> None:
    module = family_module("qwen3_moe")
    module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint_tensors(module.named_parameters()))
    assert set(found) == set(saved) and "model.layers.1.mlp.experts.3.up_proj.weight" in found
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name


def test_what_is_written_to_a_view_is_in_the_parameter() -> None:
    module = family_module("qwen3_moe")
    stacked = module.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    before = stacked.detach().clone()
    dict(checkpoint_tensors(module.named_parameters()))["model.layers.0.mlp.experts.2.up_proj.weight"].fill_(7.0)
    assert (stacked[2, 32:] == 7.0).all()
    stacked.data[2, 32:] = before[2, 32:]
    assert torch.equal(stacked, before)


def test_a_dense_model_keeps_its_parameters() -> None:
    module = tiny_module()
    assert all(dict(module.named_parameters())[name] is p for name, p in checkpoint_tensors(module.named_parameters()))


def test_regions_cover_a_parameter_once() -> None:
    counts = torch.zeros(3, 8, 5)
    for region in regions("m.experts.gate_up_proj", (3, 8, 5)):
        counts[tuple(slice(low, low + size) for low, size in region.box)] += 1
        assert region.shape == (4, 5)
    assert (counts == 1).all()
