"""What a recipe may say about the builtin training backend."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from areal.contracts.options import Options


class TorchBackendOptions(Options):
    """Invariant: no option but `adam_eps` changes the update, beyond floating-point rounding."""

    adam_eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""
    logits_mb: PositiveInt = 512
    """Megabytes of float32 logits computed at once; a micro-batch that needs more computes its logits in pieces, and
    once more in the backward pass."""
