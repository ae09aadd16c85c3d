"""Dr. GRPO: GRPO without the two divisions that favour long wrong answers and easy prompts."""

from __future__ import annotations

from areal.algorithms.advantages import Scale
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.policy import Aggregation


class DrGrpoOptions(GrpoOptions):
    """Invariant: as `GrpoOptions`; only the defaults differ."""

    scale: Scale = "none"
    """``none``: advantages are not divided by anything."""
    aggregation: Aggregation = "fixed_length"
    """``fixed_length``: a sequence's sum is divided by `fixed_length`, whatever its own length."""


class DrGrpo(Grpo):
    """GRPO done right (arXiv 2503.20783): ``A = reward - mean``, sequences not divided by their own length.

    Invariant: as `Grpo`.
    """

    def __init__(self, options: DrGrpoOptions | None = None) -> None:
        super().__init__(options or DrGrpoOptions())
