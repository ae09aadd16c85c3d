"""Every recipe that is shipped loads, fits the JSON schema, and gives components options they take."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from areal.config import bundled_recipes, config_schema, dump, load_recipe
from areal.errors import UnknownComponent
from areal.plugins import discover

ROOT = Path(__file__).parents[2]
RECIPES = [
    *bundled_recipes().values(),
    *sorted((ROOT / "recipes").rglob("*.yaml")),
    *sorted((ROOT / "examples").rglob("*.yaml")),
]
SHOWN = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


class EditorLoader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as editors (YAML 1.2) do."""


EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def test_the_promised_recipes_are_there():
    names = {path.name for path in RECIPES}
    assert {"default.yaml", "smollm2_arithmetic.yaml", "gsm8k.yaml", "gsm8k_grpo_npu.yaml"} <= names


@SHOWN
def test_recipe_loads_and_its_resolved_form_too(recipe, tmp_path):
    config = load_recipe(str(recipe))
    (tmp_path / "resolved.yaml").write_text(dump(config))
    assert load_recipe(str(tmp_path / "resolved.yaml")) == config


@SHOWN
def test_recipe_fits_the_schema_that_editors_use(recipe):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(config_schema())
    data = yaml.load(recipe.read_text(encoding="utf-8"), Loader=EditorLoader)
    jsonschema.Draft202012Validator(config_schema()).validate(data)


def test_the_schema_refuses_what_the_loader_refuses():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(config_schema())
    for wrong in (
        {"training": {"learning_rat": 1}},
        {"training": {"batch_size": 0}},
        {"environments": []},
        {"environments": [{"name": "a"}]},
        {"resources": {"train": {"parallel": "ddp"}}},
        {"trackers": [3]},
    ):
        assert not validator.is_valid(wrong), wrong
    for right in ({"engine": {"anything": 1}}, {"trackers": ["jsonl", {"name": "wandb", "project": "p"}]}):
        assert validator.is_valid(right), right


@SHOWN
def test_options_are_what_installed_components_take(recipe):
    plugins = discover()

    def resolve(kind, name):
        try:
            return plugins.resolve(kind, name)
        except UnknownComponent:
            return None

    load_recipe(str(recipe), resolve=resolve)


@pytest.mark.parametrize("recipe", bundled_recipes().values(), ids=lambda path: path.name)
def test_bundled_recipes_are_short_enough_for_a_newcomer(recipe):
    assert len(recipe.read_text(encoding="utf-8").splitlines()) <= 20


def test_the_example_script_defines_main():
    tree = ast.parse((ROOT / "examples/math/gsm8k_rl.py").read_text(encoding="utf-8"))
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert len(mains) == 1 and [argument.arg for argument in mains[0].args.args] == ["config"]


def test_options_fit_the_bundled_tasks():
    from areal.builtins.tasks.gsm8k import Gsm8kOptions
    from areal.builtins.tasks.reasoning_gym import ReasoningGymOptions
    from areal.builtins.tasks.reverse_digits import ReverseDigitsOptions

    owners = {"gsm8k": Gsm8kOptions, "reasoning_gym": ReasoningGymOptions, "reverse_digits": ReverseDigitsOptions}
    checked = set()
    for recipe in RECIPES:
        for environment in load_recipe(str(recipe)).environments:
            if owner := owners.get(environment.type):
                owner.model_validate(environment.options)
                checked.add(environment.type)
    assert checked == set(owners)
