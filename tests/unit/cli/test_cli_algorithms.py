"""`areal algorithms`: every algorithm with its paper and its options, without torch."""

from __future__ import annotations

import json

from click.testing import CliRunner

from areal.cli.main import group


def described(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(group, ["algorithms", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_every_algorithm_is_listed_with_its_paper() -> None:
    listed = {each["name"]: each for each in described()}
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce", "sft"} <= listed.keys()
    assert listed["gspo"]["papers"] == ["arXiv 2507.18071"]
    assert all(each["summary"] and not each["missing"] for each in listed.values())


def test_options_are_those_that_a_recipe_takes() -> None:
    (dr_grpo,) = described("dr_grpo")
    options = {option["name"]: option for option in dr_grpo["options"]}
    assert options["scale"]["default"] == "none" and options["scale"]["own"]
    assert options["clip_low"]["default"] == 0.2 and not options["clip_low"]["own"]
    assert all(option["meaning"] for option in dr_grpo["options"])


def test_for_people() -> None:
    overview = CliRunner().invoke(group, ["algorithms"])
    assert "arXiv 2402.03300" in overview.output and "clip_low=0.2" in overview.output
    one = CliRunner().invoke(group, ["algorithms", "gspo"])
    assert "behavior_level" in one.output and "geometric" in one.output


def test_a_misspelt_name() -> None:
    result = CliRunner().invoke(group, ["algorithms", "grop"])
    assert result.exit_code == 2 and "no algorithm named 'grop'" in result.output and "grpo" in result.output
