"""Combinations that cannot run: each is refused at its line, with a value that can."""

import json
from pathlib import Path

import pytest

from areal.config import load_recipe
from areal.errors import ConfigError

REFUSED = {
    "training:\n  batch_size: 32\n  minibatches: 5": (
        ":3: 'training.minibatches' 5 does not divide 'training.batch_size' 32; nearest: 4"
    ),
    "training: {batch_size: 4, minibatches: 9}": (
        ":1: 'training.minibatches' 9 does not divide 'training.batch_size' 4; nearest: 4"
    ),
    "training: {amp: {enabled: true, loss_scale: 1024}}": (
        ":1: 'training.amp.loss_scale' 1024 is for dtype fp16; remove it, or set dtype: fp16"
    ),
    "model: {num_experts: 8}": ":1: 'model.num_experts' 8 is for mixtures of experts; set 'model.type': moe",
    "model: {path: x, top_k: 2}": ":1: 'model.top_k' 2 is for mixtures of experts; set 'model.type': moe",
    "model: {path: x, type: moe, num_experts: 4, top_k: 8}": (
        ":1: 'model.top_k' 8 is more than 'model.num_experts' 4; nearest: 4"
    ),
    "model: {type: moe}": (
        ":1: 'model.type' moe without a 'model.path' needs 'model.num_experts' and 'model.top_k', for example 4 and 2"
    ),
    "resources:\n  train: {num_gpus: 4, num_nodes: 2, gpus_per_node: 4}": (
        ":2: 'resources.train.num_gpus' 4 contradicts 2 nodes with 4 each; give 8, or leave it out"
    ),
    "resources:\n  infer: {num_gpus: 5, num_nodes: 3}": (
        ":2: 'resources.infer.num_gpus' 5 cannot be spread evenly over 3 nodes; nearest: 6"
    ),
    "resources: {infer: {num_gpus: 4}}\nengine:\n  replicas: 3": (
        ":3: 'engine.replicas' 3 cannot share 4 devices of 'resources.infer' evenly; nearest: 2"
    ),
    "resources:\n  shared: true\n  train: {num_gpus: 2}": (
        ":2: 'resources.shared' is for one device and 'resources.train' asks for 2; ask for one, or leave "
        "'resources.shared' out"
    ),
    "resources: {shared: true, infer: {num_nodes: 2}}": (
        ":1: 'resources.shared' is for one device and 'resources.infer' asks for 2; ask for one, or leave "
        "'resources.shared' out"
    ),
    "resources: {shared: true}\nengine:\n  replicas: 2": (
        ":3: 'resources.shared' is for one engine and 'engine.replicas' is 2; nearest: 1"
    ),
    "environments:\n- {name: m, type: a}\n- {name: n, type: b}\n- {name: m, type: c}": (
        ":2: 2 environments are named 'm'; give each its own 'name'"
    ),
    "environments:\n- {type: a, weight: 0}\n- {type: b, weight: 0.0}": (
        ":2: every environment has weight 0; give at least one a weight above 0"
    ),
    "environments: []": ":1: 'environments' is empty; name at least one, for example {type: reverse_digits}",
    "sampling: {temperature: 0}": (
        ":1: 'sampling.temperature' 0 makes the 8 samples of a prompt equal, so nothing can be learned; "
        "nearest: 1.0, or 'algorithm.group_size' 1"
    ),
    "name: a/../b": ":1: 'name' 'a/../b' cannot be a folder's name; nearest: 'a-..-b'",
    "name: ..": ":1: 'name' '..' cannot be a folder's name; nearest: 'run'",
    "reshard:\n  folder: x": ":2: 'reshard.folder' is an option of a component, but 'reshard.name' is auto; name one",
    "reshard:\n  overlaps: x": (
        ":2: 'reshard.overlaps' is an option of a component, but 'reshard.name' is auto; did you mean 'overlap'?"
    ),
    "cluster: {address: x}": ":1: 'cluster.address' is an option of a component, but 'cluster.name' is auto; name one",
    "trackers: [jsonl, wandb, {name: jsonl}]": ":1: tracker 'jsonl' stands 2 times; keep one",
}

ALLOWED = [
    "training: {batch_size: 32, minibatches: 32}",
    "training: {max_steps: 5, lr_warmup_steps: 20}",
    "training: {amp: {enabled: true, dtype: fp16, loss_scale: 1024}}",
    "training: {amp: {enabled: false, loss_scale: 1024}}",
    "model: {path: x, type: moe}",
    "model: {type: moe, num_experts: 4, top_k: 4}",
    "model: {type: dense}\nparallel: {expert: dp, other: tp}",
    "resources: {train: {num_gpus: 8, num_nodes: 2, gpus_per_node: 4}, infer: {num_gpus: 6, num_nodes: 3}}",
    "resources: {infer: {num_gpus: 4}}\nengine: {replicas: 2}",
    "engine: {replicas: 3}",
    "resources: {shared: true, train: {num_gpus: 1}, infer: {num_gpus: 1}}",
    "environments: [{type: a, weight: 0}, {type: b}]",
    "sampling: {temperature: 0}\nalgorithm: {group_size: 1}",
    "staleness: {max: 0}",
    "name: a.b-c d",
]


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("text", REFUSED, ids=repr)
def test_refused_with_line_and_nearest_value(write, text):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert str(caught.value) == f"{path}{REFUSED[text]}"


DENSE = {"model_type": "qwen3"}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        (DENSE, "type: moe", "has no experts; set 'model.type': dense, or take another 'model.path'"),
        (EXPERTS, "type: moe, num_experts: 7", "'model.num_experts' is 7 and the model in "),
        (EXPERTS, "type: moe, num_experts: 7", " has 4; nearest: 4"),
        (EXPERTS, "type: moe, top_k: 3", " has 2; nearest: 2"),
    ],
)
def test_what_a_model_says_of_its_experts_counts(write, tmp_path, there, asked, expected):
    (tmp_path / "config.json").write_text(json.dumps(there), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(write(f"model: {{path: {tmp_path}, {asked}}}")))
    assert expected in str(caught.value) and ":1: " in str(caught.value)


@pytest.mark.parametrize("there", ["", "[]", '{"num_experts": "many"}', '{"text_config": 3}'])
def test_a_model_that_cannot_be_read_is_left_to_who_loads_it(write, tmp_path, there):
    (tmp_path / "config.json").write_text(there, encoding="utf-8")
    path = write(f"model: {{path: {tmp_path}, type: moe, num_experts: 4, top_k: 2}}")
    if "many" in there:
        with pytest.raises(ConfigError, match="has no experts"):
            load_recipe(str(path))
    else:
        assert load_recipe(str(path)).model.num_experts == 4


def test_without_a_path_no_configuration_counts(write, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(DENSE), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    load_recipe(str(write("model: {type: moe, num_experts: 4, top_k: 2}")))


def test_a_model_with_as_many_experts_loads(write, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS), encoding="utf-8")
    for asked in ("type: moe", "type: moe, num_experts: 4, top_k: 2", "type: dense"):
        load_recipe(str(write(f"model: {{path: {tmp_path}, {asked}}}")))


@pytest.mark.parametrize("text", ALLOWED, ids=repr)
def test_neighbours_of_refused_combinations_load(write, text):
    load_recipe(str(write(text)))


def test_a_combination_made_by_the_command_line_says_so(write):
    path = write("training: {batch_size: 32}")
    with pytest.raises(ConfigError, match=r"^command line, training\.minibatches=3: "):
        load_recipe(str(path), ["training.minibatches=3"])
