"""These tests run the real vLLM: `make test-vllm` has an environment with it; elsewhere they are not collected."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # vLLM leaves sockets to its ranks open when one of them died.
    config.addinivalue_line("filterwarnings", "ignore:Unclosed:ResourceWarning")
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
