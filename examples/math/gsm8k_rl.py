"""GRPO on GSM8K from a script of your own.

python -m areal.launcher.local examples/math/gsm8k_rl.py --config recipes/gsm8k.yaml training.max_steps=50
"""

from areal.app import run
from areal.config import RunConfig


def main(config: RunConfig) -> None:
    """Train as `config` says; the launcher has read and checked it."""
    print(f"{config.training.max_steps} steps of {config.training.batch_size} prompts with {config.algorithm.name}")
    run(config)
