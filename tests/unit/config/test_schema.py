"""The schema: its size, its documentation, its strictness, and the page that lists it."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from areal.config import RunConfig, config_schema
from areal.config.schema import DeviceGroup
from areal.contracts.messages import Sampling
from areal.contracts.specs import ModelSpec, TrainingSpec

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def leaves(node=None, path=()):
    """Yield (path, schema node) for every value a recipe can set; a list of blocks counts by its block's keys."""
    schema = config_schema()
    node = schema if node is None else node
    if "$ref" in node:
        described = {key: value for key, value in node.items() if key != "$ref"}
        node = {**schema["$defs"][node["$ref"].rpartition("/")[2]], **described}
    if node.get("type") == "array" and "$ref" in node.get("items", {}):
        yield from leaves(node["items"], (*path, "*"))
    elif "properties" in node:
        for key, child in node["properties"].items():
            yield from leaves(child, (*path, key))
    else:
        yield ".".join(path), node


def allowed(node):
    """Describe the values of a leaf in a few words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(allowed(option) for option in node["anyOf"]))
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "$ref" in node:
        return "a block with `name`"
    if node.get("type") == "array":
        many = node.get("prefixItems")
        return f"{len(many)} x {allowed(many[0])}" if many else f"list: {allowed(node['items'])}"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {node[key]:.15g}" for key, sign in bounds.items() if key in node]
    return " ".join([words[node["type"]], *limits])


def default(node):
    if "default" not in node:
        return "(needed)"
    value = node["default"]
    if isinstance(value, list):
        value = [item["name"] if isinstance(item, dict) else item for item in value]
        return f"`[{', '.join(str(item) for item in value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "(empty)" if value == "" else f"`{value}`"


def rows():
    for path, node in leaves():
        meaning = " ".join(node["description"].replace("``", "`").split()).replace("|", "\\|")
        yield f"| `{path}` | {allowed(node)} | {default(node)} | {meaning} |"


def test_the_whole_configuration_stays_small():
    names = [path for path, _ in leaves()]
    assert "training.amp.loss_scale" in names and "environments.*.weight" in names  # the walk goes all the way down
    assert 50 < len(names) <= 120


def test_no_block_has_more_than_fifteen_fields_of_its_own():
    sizes = {name: len(node["properties"]) for name, node in config_schema()["$defs"].items() if "properties" in node}
    assert max(sizes.values()) <= 15, sizes
    assert "TrainingSpec" in sizes


def test_every_field_says_what_it_means():
    schema = config_schema()
    blocks = {"RunConfig": schema, **schema["$defs"]}
    silent = [
        f"{name}.{field}"
        for name, block in blocks.items()
        for field, node in block.get("properties", {}).items()
        if len(node.get("description", "")) < 8
    ]
    assert silent == []


def test_the_page_lists_every_leaf_as_the_code_has_it():
    written = {line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")}
    missing = [row for row in rows() if row not in written]
    assert missing == [], "docs/configuration.md lacks:\n" + "\n".join(missing)
    gone = written - set(rows())
    assert gone == set(), "docs/configuration.md lists what the schema does not have"


def test_blocks_are_the_contracts_own_classes():
    config = RunConfig()
    assert type(config.model) is ModelSpec
    assert type(config.training) is TrainingSpec
    assert type(config.sampling) is Sampling


def test_schema_forbids_unknown_keys_except_where_a_component_owns_them():
    schema = config_schema()
    open_blocks = {name for name, node in schema["$defs"].items() if node.get("additionalProperties") is not False}
    assert schema["additionalProperties"] is False
    assert open_blocks == {
        *("AlgorithmChoice", "BackendChoice", "ClusterChoice", "EngineChoice", "EnvironmentChoice"),
        *("ReshardChoice", "TrackerChoice"),
    }


def test_configuration_is_frozen():
    config = RunConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(AttributeError):
        config.training.max_steps = 3


@pytest.mark.parametrize(
    ("group", "total"),
    [
        (DeviceGroup(), 1),
        (DeviceGroup(num_gpus=4), 4),
        (DeviceGroup(num_nodes=2, gpus_per_node=8), 16),
        (DeviceGroup(num_nodes=3), 3),
        (DeviceGroup(num_gpus=4, num_nodes=2, gpus_per_node=2), 4),
    ],
)
def test_total_devices(group, total):
    assert group.total == total


def test_selected_names_every_component_but_auto():
    config = RunConfig.model_validate(
        {
            "device": "npu",
            "engine": {"name": "vllm", "max_num_seqs": 3},
            "environments": [{"type": "gsm8k", "data": "x.jsonl"}, {"name": "b", "type": "my.module:Task"}],
            "trackers": ["jsonl", {"name": "wandb", "project": "p"}],
        }
    )
    found = [(choice.kind, choice.path, choice.name, dict(choice.options)) for choice in config.selected()]
    assert found == [
        ("accelerator", ("device",), "npu", {}),
        ("algorithm", ("algorithm",), "grpo", {}),
        ("engine", ("engine",), "vllm", {"max_num_seqs": 3}),
        ("backend", ("backend",), "torch", {}),
        ("environment", ("environments", 0), "gsm8k", {"data": "x.jsonl"}),
        ("environment", ("environments", 1), "my.module:Task", {}),
        ("tracker", ("trackers", 0), "jsonl", {}),
        ("tracker", ("trackers", 1), "wandb", {"project": "p"}),
    ]


def test_environment_is_named_after_its_type():
    config = RunConfig.model_validate({"environments": [{"type": "gsm8k"}]})
    assert config.environments[0].name == "gsm8k"


def test_reading_recipes_imports_nothing_heavy():
    code = (
        "import sys, areal.config; areal.config.load_recipe();"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
