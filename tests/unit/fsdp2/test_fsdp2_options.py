"""What the options refuse when a recipe is read, and what they choose where the recipe leaves it open."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.contracts.specs import LayerParallel, ModelSpec, TrainerDevices, TrainingSpec
from areal_fsdp2.dimensions import Dimensions
from areal_fsdp2.limits import Shape, problem_of
from areal_fsdp2.options import Fsdp2Options

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 192,
}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8}


def problem(tmp_path: Path, config: dict[str, Any], world: int, **options: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    devices = TrainerDevices(world_size=world, per_node=world)
    said = Fsdp2Options(**options).problem(devices, ModelSpec(path=str(tmp_path)), TrainingSpec())
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        (3, {}),
        (4, {"tp": 2, "sp": 2}),
        (8, {"tp": 2, "sp": 2, "pp": 2}),
        (8, {"pp": 4, "replicate": 2}),
        (4, {"sp": 4}),
        (8, {"sp": 8}),  # key-value heads are repeated
    ],
)
def test_what_fits_passes(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    assert problem(tmp_path, QWEN3, world, **options) == ""


@pytest.mark.parametrize(
    ("config", "world", "options", "expected"),
    [
        (QWEN3, 4, {"tp": 3}, "tp 3 x sp 1 x pp 1 = 3 does not divide the 4 devices of the trainer; use tp 2 or 4"),
        (QWEN3, 4, {"tp": 2, "sp": 4}, "= 8 does not divide the 4 devices of the trainer; use tp 1"),
        (QWEN3, 6, {"replicate": 4}, "does not divide the 6 data-parallel ranks; use replicate 3 or 6"),
        (QWEN3, 8, {"tp": 8}, "tp 8 does not divide the model's 4 key-value heads; use tp 4"),
        ({**QWEN3, "num_attention_heads": 12, "num_key_value_heads": 12}, 8, {"tp": 8}, "12 attention heads; use tp 4"),
        ({**QWEN3, "vocab_size": 97}, 2, {"tp": 2}, "tp 2 does not divide the model's vocabulary 97; use tp 1"),
        ({**QWEN3, "intermediate_size": 191}, 2, {"tp": 2}, "intermediate size 191"),
        (QWEN3, 3, {"sp": 3}, "key-value heads; use sp 1"),
        (QWEN3, 8, {"pp": 8}, "pp 8 is more than the model's 4 layers; use pp 4"),
        (QWEN3, 2, {"ep": 2}, "ep 2 shares experts out and the model type 'qwen3' has none; use ep 1"),
        (MOE, 16, {"ep": 8, "tp": 2}, "ep 8 x tp 2 = 16 does not divide the model's 8 experts; use ep 4"),
        (MOE, 4, {"ep": 3}, "ep 3 does not divide the 4 data-parallel ranks; use ep 2 or 4"),
        ({**MOE, "num_experts": 6}, 4, {"ep": 4}, "ep 4 does not divide the model's 6 experts; use ep 2"),
        ({**QWEN3, "model_type": "gpt2"}, 2, {"tp": 2}, "tp 2 needs a plan for the model type 'gpt2' and there is one"),
        ({**QWEN3, "model_type": "gpt2"}, 2, {"pp": 2}, "not the model type 'gpt2'; use pp 1"),
        ({**QWEN3, "vocab_size": 100}, 8, {"tp": 8}, "vocabulary 100; use tp 4"),  # 5 and 10 would not divide 8 devices
        (QWEN3, 6, {"tp": 4, "sp": 4}, "= 16 does not divide the 6 devices of the trainer; use tp 1 and sp 2"),
        (MOE, 8, {"tp": 2, "ep": 2, "lora": {}}, "not with tp 2, ep 2; use tp 1 and ep 1"),
    ],
)
def test_what_cannot_run_is_refused_with_the_nearest_values(
    tmp_path: Path, config: dict[str, Any], world: int, options: dict[str, Any], expected: str
) -> None:
    assert expected in problem(tmp_path, config, world, **options)


SMALL = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24])


@given(
    world=SMALL,
    wanted=st.builds(Dimensions, tp=SMALL, sp=SMALL, pp=SMALL, ep=SMALL, replicate=SMALL),
    shape=st.none()
    | st.builds(
        Shape,
        type=st.sampled_from(["qwen3", "gpt2", ""]),
        layers=st.integers(0, 6),
        heads=SMALL,
        kv_heads=SMALL,
        vocab=SMALL,
        intermediate=SMALL,
        experts=st.sampled_from([0, 4, 6]),
    ),
    lora=st.booleans(),
)
def test_who_does_what_a_refusal_says_is_not_refused_again(
    world: int, wanted: Dimensions, shape: Shape | None, lora: bool
) -> None:
    said = problem_of(wanted, world, shape, lora=lora)
    advice = said.rpartition("; use ")[2]
    changes = [re.fullmatch(r"(\w+) (\d+)(?: or (\d+))?", part) for part in advice.split(" and ") if part]
    assert bool(said) == bool(changes)
    for choice in (2, 3):
        told = {found[1]: int(found[choice] or found[2]) for found in changes if found is not None}
        assert problem_of(replace(wanted, **told), world, shape, lora=lora) == ""


def test_a_model_that_is_not_here_is_not_judged() -> None:
    options, devices = Fsdp2Options(tp=8), TrainerDevices(world_size=8)
    assert options.problem(devices, ModelSpec(path="somebody/model"), TrainingSpec()) == ""
    assert "does not divide" in options.problem(TrainerDevices(world_size=6), ModelSpec(path="x/y"), TrainingSpec())


@pytest.mark.parametrize(
    "text", ["[1, 2]", '"text"', '{"num_attention_heads": "four"}', '{"text_config": "x"}', '{"vocab_size": [1, 2]}']
)
def test_a_configuration_of_another_form_is_left_to_whoever_loads_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    devices = TrainerDevices(world_size=2, per_node=2)
    assert Fsdp2Options().problem(devices, ModelSpec(path=str(tmp_path)), TrainingSpec()) == ""


def test_an_empty_path_is_the_bundled_tiny_model() -> None:
    said = Fsdp2Options(tp=4).problem(TrainerDevices(world_size=4), ModelSpec(), TrainingSpec())
    assert said == "tp 4 does not divide the model's 2 key-value heads; use tp 2"


def test_the_bundled_tiny_model_has_the_experts_that_are_asked_for() -> None:
    model, devices = ModelSpec(type="moe", num_experts=4, top_k=2), TrainerDevices(world_size=2)
    assert Fsdp2Options().problem(devices, model, TrainingSpec()) == ""
    assert Fsdp2Options().dimensions(devices, model) == Dimensions(shard=2, ep=2)
    said = Fsdp2Options(ep=8).problem(TrainerDevices(world_size=8), model, TrainingSpec())
    assert said == "ep 8 does not divide the model's 4 experts; use ep 4"


@pytest.mark.parametrize(
    ("parallel", "options", "expected"),
    [
        ("dp", {}, Dimensions(shard=4)),
        ("tp", {}, Dimensions(tp=4)),
        ("pp", {}, Dimensions(pp=4)),
        ("tp", {"sp": 2}, Dimensions(tp=2, sp=2)),
        ("tp", {"tp": 2}, Dimensions(tp=2, shard=2)),
        ("tp", {"tp": 1}, Dimensions(shard=4)),
        ("pp", {"replicate": 2, "pp": 1}, Dimensions(replicate=2, shard=2)),
    ],
)
def test_the_recipes_parallelism_chooses_what_is_open(parallel: Any, options: Any, expected: Dimensions) -> None:
    devices = TrainerDevices(world_size=4, parallel=parallel)
    assert Fsdp2Options(**options).dimensions(devices, ModelSpec(path="somebody/model")) == expected


def test_a_mixture_of_experts_reads_its_own_block() -> None:
    model = ModelSpec(path="somebody/model", type="moe")
    devices = TrainerDevices(world_size=4, parallel="pp", layers=LayerParallel(expert="dp", other="tp"))
    assert Fsdp2Options().dimensions(devices, model) == Dimensions(tp=2, shard=2, ep=2)
    alone = TrainerDevices(world_size=4, layers=LayerParallel(expert="tp", other="dp"))
    assert Fsdp2Options().dimensions(alone, model) == Dimensions(shard=4)


def test_every_rank_has_its_place() -> None:
    dimensions = Dimensions(pp=2, replicate=2, shard=2, sp=2, tp=2)
    places = [tuple(dimensions.place(rank).items()) for rank in range(dimensions.world)]
    assert len(set(places)) == dimensions.world == 32
    # Slices of a layer are neighbours, then parts of a sequence.
    assert [dimensions.place(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert [dimensions.place(rank)["sp"] for rank in range(4)] == [0, 0, 1, 1]
    speakers = dimensions.speakers()
    assert [dimensions.data_rank(rank) for rank in speakers] == [0, 1, 2, 3]
    assert all(
        {**dimensions.place(rank), "shard": 0, "replicate": 0}
        == {"pp": 1, "replicate": 0, "shard": 0, "sp": 0, "tp": 0}
        for rank in speakers
    )
