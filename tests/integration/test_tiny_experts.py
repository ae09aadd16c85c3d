"""A run with the bundled model, its layers made of experts: what the recipe asks for is what is trained and served."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from areal.app import run
from areal.config import load_recipe
from areal.plugins import discover

RECIPE = (
    "model={type: moe, num_experts: 4, top_k: 2}",
    "training={max_steps: 2, batch_size: 2, warmup: {steps: 2}}",
    "algorithm.group_size=4",
    "evaluation.every_steps=0",
    "cluster.name=inline",
    "trackers=[jsonl]",
)


def test_the_experts_of_the_recipe_are_trained_and_served(tmp_path: Path) -> None:
    config = load_recipe(None, (*RECIPE, f"runs_dir={tmp_path}"), resolve=discover().resolve)
    done = run(config, console=Console(quiet=True))
    assert [step for step, _ in done.steps] == [1, 2]
    said = json.loads((done.checkpoint / "config.json").read_text(encoding="utf-8"))
    assert (said["model_type"], said["num_local_experts"], said["num_experts_per_tok"]) == ("qwen3_moe", 4, 2)
    before, after = (load_file(path / "model.safetensors") for path in (done.folder / "model", done.checkpoint))
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 3 * 4 * 3 and before.keys() == after.keys()
    assert sum(not before[name].equal(after[name]) for name in experts) > len(experts) // 2
