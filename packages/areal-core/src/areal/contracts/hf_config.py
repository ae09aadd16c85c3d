"""What the config.json in a model's folder says, read without transformers and before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the experts of each layer."""
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def hf_config(folder: str) -> Mapping[str, Any] | None:
    """Return a folder's config.json, what it says of the text model on top; None where it cannot be read so."""
    try:
        said: Any = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return {**said, **(said.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError):  # whoever loads the model says what is wrong
        return None


def size_of(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these that is a whole number other than 0; 0: none is.

    Some families have a list there, a number for each layer.
    """
    return next((config[name] for name in names if isinstance(config.get(name), int) and config[name]), 0)
