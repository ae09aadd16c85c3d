"""The learning rate as a function of the number of updates."""

from __future__ import annotations

import math

from areal.contracts.specs import TrainingSpec


def learning_rate(training: TrainingSpec, update: int) -> float:
    """Return the rate of update number `update`, from 0.

    It rises linearly over ``lr_warmup_steps`` updates (the first is above 0, the last at the full rate), then stays,
    or falls linearly or as half a cosine to ``min_lr_ratio`` at the run's last update and stays there.
    """
    warmup, peak = training.lr_warmup_steps, training.learning_rate
    if update < warmup:
        return peak * (update + 1) / warmup
    if training.schedule == "constant":
        return peak
    last = training.max_steps * training.minibatches - 1
    done = min(1.0, (update - warmup) / max(1, last - warmup))
    left = 1 - done if training.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (training.min_lr_ratio + (1 - training.min_lr_ratio) * left)
