"""Supervised warm-up: a few updates on reference answers before the first rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from areal.contracts.cluster import Calls
from areal.contracts.component import Component
from areal.contracts.specs import WarmupSpec
from areal.errors import ConfigError
from areal.flow.trainer.worker import Demonstration

Demonstrate = Callable[[int], Awaitable[Sequence[Demonstration]]]
"""Returns so many demonstrations of training prompts, the next ones at each call."""

RAMP = 2 / 3
"""Share of the warm-up steps over which the rate rises; Adam's first steps on a new model need care."""


async def warm_up(
    trainer: Calls,
    demonstrate: Demonstrate,
    spec: WarmupSpec,
    sft: Component,
    told: Callable[[int, float], None],
    deadline_s: float,
) -> None:
    """Make `spec.steps` supervised updates, each within `deadline_s`; `told` hears (step, loss) after each."""
    ramp = max(1.0, spec.steps * RAMP)
    for step in range(spec.steps):
        demonstrations = await demonstrate(spec.batch_size)
        if not demonstrations:
            raise ConfigError(
                "training.warmup needs prompts with reference answers and the environments have none; set "
                "training.warmup.steps to 0"
            )
        rate = spec.learning_rate * min(1.0, (step + 1) / ramp)
        told(step + 1, await trainer.call("warm_up", demonstrations, sft, rate, deadline_s=deadline_s))
