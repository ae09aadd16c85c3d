"""docs/metrics.md names what a run reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from areal.app import run
from areal.config import load_recipe
from areal.plugins import discover

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
OVERRIDES = (
    "training.max_steps=4",
    "training.batch_size=4",
    "algorithm.group_size=4",
    "training.warmup.steps=0",
    "evaluation.every_steps=2",
    "cluster.name=inline",
    "trackers=[jsonl]",
)

OF_VLLM = ("engine/limit", "engine/preemptions_total", "engine/cached_tokens_total")
"""Named on the page, and no other engine has them."""
OF_SIM = ("engine/busy_share", "engine/working_share")


def documented() -> set[str]:
    rows = re.findall(r"^\| (`.+?`) \|", PAGE, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w/*]+)`", row)}


def test_the_page_names_what_a_run_reports(tmp_path: Path) -> None:
    config = load_recipe(None, (*OVERRIDES, f"runs_dir={tmp_path}"), {"algorithm": "ppo"}, discover().resolve)
    summary = run(config, console=Console(quiet=True))
    lines = (summary.folder / "metrics.jsonl").read_text().splitlines()
    reported = {name for line in lines for name in json.loads(line)} - {"step", "time"}
    names = documented()
    families = {name.removesuffix("*") for name in names if name.endswith("/*")}
    assert {"engine/running", "train/loss", "eval/reward/mean"} <= reported
    assert {name for name in reported - names if not name.startswith(tuple(families))} == set()
    unheard = {name for name in names - reported if not name.endswith("/*")}
    assert unheard <= {"engine/tokens_per_s", *OF_VLLM, *OF_SIM}, "the first takes two answers of the engines"
