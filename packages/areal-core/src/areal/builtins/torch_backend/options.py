"""What a recipe may say about the builtin training backend."""

from __future__ import annotations

from pydantic import PositiveFloat

from areal.contracts.options import Options


class TorchBackendOptions(Options):
    """Invariant: what other backends have too is in `training`, not here."""

    adam_eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""
