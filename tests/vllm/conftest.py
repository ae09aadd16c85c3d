"""These tests run the real vLLM: `make test-vllm` has an environment with it; elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
