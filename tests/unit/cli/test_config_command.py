"""`areal config`: what it prints is what a run would read."""

import json

import yaml
from click.testing import CliRunner

from areal.cli.config import command
from areal.config import config_schema, load_recipe, to_plain
from areal.errors import ConfigError


def call(*arguments: str):
    return CliRunner().invoke(command, arguments)


def test_without_arguments_it_prints_the_default_recipe():
    result = call()
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == to_plain(load_recipe())


def test_overrides_selections_and_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 3\nreshard: {name: disk}\n")
    result = call(str(path), "training.learning_rate=1e-6", "--reshard", "xccl", "--device", "cpu")
    plain = yaml.safe_load(result.stdout)
    assert (plain["seed"], plain["training"]["learning_rate"]) == (3, 1e-6)
    assert (plain["reshard"], plain["device"]) == ({"name": "xccl", "overlap": True}, "cpu")


def test_first_argument_may_be_an_override():
    assert yaml.safe_load(call("seed=9").stdout)["seed"] == 9


def test_components_that_are_not_installed_are_named_and_not_checked():
    result = call("--engine", "no_such_engine", "engine.anything=1")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["engine"]["anything"] == 1
    assert result.stderr.startswith("not checked: ") and "no_such_engine" in result.stderr


def test_options_of_installed_components_are_checked():
    result = call("environments.0.digit=3")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).endswith("unknown key 'digit' in 'environments.0'; did you mean 'digits'?")


def test_schema_is_json():
    assert json.loads(call("--schema").stdout) == config_schema()
