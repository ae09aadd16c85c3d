"""No run outlives its test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from run_processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    started: Processes = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()
