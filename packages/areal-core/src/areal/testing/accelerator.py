"""The conformance kit of accelerators.

    class TestMine(AcceleratorConformance):
        @pytest.fixture
        def component(self) -> Component:
            return Component(name="mine", factory="my_package.mine:Mine")

On a machine without the device only the cases that need none run; the others are skipped.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from areal.contracts.accelerator import Accelerator
from areal.contracts.component import Component

if TYPE_CHECKING:
    from collections.abc import Mapping

# Run in a fresh process: which answers need a device's context is visible there only.
ASK_EVERYTHING = """
import pickle, sys, torch
accelerator = pickle.loads(bytes.fromhex(sys.argv[1]))
if accelerator.is_available():
    accelerator.count(), accelerator.memory(), accelerator.utilisation()
accelerator.environment(1, 1)
module = getattr(torch, accelerator.name, None)
started = accelerator.name != "cpu" and getattr(module, "is_initialized", lambda: False)()
sys.exit(3 if started else 0)
"""
SHOW_THREADS = "import torch; print(torch.get_num_threads())"


class AcceleratorConformance:
    """Subclass it, give `component`, and `options` when there are any. Invariant: no case needs a device to fail."""

    @pytest.fixture
    def component(self) -> Component:
        raise NotImplementedError("give the accelerator's Component in a fixture named 'component'")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The options as a recipe's table."""
        return {}

    @pytest.fixture
    def accelerator(self, component: Component, options: dict[str, Any]) -> Accelerator:
        return component.load()(component.parse_options(options))

    @pytest.fixture
    def present(self, accelerator: Accelerator) -> Accelerator:
        """The accelerator, where this machine has its device."""
        if not accelerator.is_available():
            pytest.skip(f"this machine has no {accelerator.name} device")
        return accelerator

    def test_it_keeps_the_contract(self, accelerator: Accelerator) -> None:
        assert isinstance(accelerator, Accelerator)
        assert isinstance(accelerator.is_available(), bool)
        assert accelerator.name and accelerator.collective

    def test_a_copy_in_another_process_is_the_same(self, accelerator: Accelerator) -> None:
        copy = pickle.loads(pickle.dumps(accelerator))
        assert (copy.name, copy.collective) == (accelerator.name, accelerator.collective)
        assert copy.is_available() == accelerator.is_available()

    def test_without_a_device_the_count_is_zero(self, accelerator: Accelerator) -> None:
        assert (accelerator.count() > 0) == accelerator.is_available()

    @pytest.mark.parametrize("threads", [1, 3])
    def test_the_environment_names_the_threads(self, accelerator: Accelerator, threads: int) -> None:
        variables = accelerator.environment(1, threads)
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in variables.items())
        assert variables["OMP_NUM_THREADS"] == str(threads)
        assert variables["OMP_WAIT_POLICY"] == "PASSIVE"

    def test_a_worker_keeps_to_one_thread(self, accelerator: Accelerator) -> None:
        assert _run(SHOW_THREADS, accelerator.environment(1, 1)).stdout.strip() == "1"

    def test_a_worker_without_a_device_is_possible(self, accelerator: Accelerator) -> None:
        assert accelerator.environment(0, 1)["OMP_NUM_THREADS"] == "1"

    def test_memory_is_in_bytes(self, present: Accelerator) -> None:
        used, total = present.memory()
        assert 0 <= used <= total
        assert total > 2**20

    def test_utilisation_is_a_share(self, present: Accelerator) -> None:
        assert all(0.0 <= present.utilisation() <= 1.0 for _ in range(3))

    def test_asking_never_starts_the_device(self, accelerator: Accelerator) -> None:
        outcome = _run(ASK_EVERYTHING, accelerator.environment(1, 1), pickle.dumps(accelerator).hex())
        assert outcome.returncode == 0, outcome.stderr


def _run(code: str, variables: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    # The kit starts processes as a cluster would: with the caller's environment and the accelerator's on top.
    environment = {**os.environ, **variables}  # noqa: TID251
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
