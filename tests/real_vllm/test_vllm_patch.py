"""The patch table on the installed vLLM: in force in every process, out of the way of what is native, verified."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal.errors import PluginError
from areal_vllm import patch

OLD = Path(__file__).with_name("vllm_without_updates.py")


def run(code: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()[-1]


STATES = "from areal_vllm import patch; print({row.name: state for row, state in patch.states()})"
LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins(); "


def test_vllm_itself_applies_it_in_a_process_of_areal() -> None:
    states = eval(run(LOAD + STATES, AREAL_VLLM="1"))
    assert states["TopKTopPSampler.__init__"] == states["finalize_layerwise_processing"] == "applied"
    added = [row.name for row in patch.PATCHES if row.kind == "add"]
    assert {states[name] for name in added} == {"native"}, "this vLLM has its own API"


def test_elsewhere_vllm_is_left_alone() -> None:
    assert "applied" not in run(LOAD + STATES, AREAL_VLLM="")


def test_twice_is_once() -> None:
    again = "from areal_vllm import patch; from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler as T; "
    check = "patch.apply(); first = T.__init__; patch.apply(); print(first is T.__init__)"
    assert run(again + check, AREAL_VLLM="1") == "True"


def test_a_changed_signature_is_an_error_that_names_the_patch() -> None:
    row = next(row for row in patch.PATCHES if row.name == "TopKTopPSampler.__init__")
    changed = replace(row, needs={"forward_native": ("self", "logits", "noise")})
    with pytest.raises(
        PluginError, match=r"'TopKTopPSampler\.__init__' does not fit vLLM .*forward_native\(self, logits"
    ):
        changed.apply()
    gone = replace(row, target="vllm.v1.sample.ops.topk_topp_sampler:Gone.__init__")
    with pytest.raises(PluginError, match=r"'Gone\.__init__' does not fit"):
        gone.apply()


def test_a_vllm_without_updates_gains_them() -> None:
    """The other path: the native methods are taken out, as in an older vLLM, and the patch's do the same work."""
    ended = subprocess.run([sys.executable, str(OLD)], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "updated by the patch"
