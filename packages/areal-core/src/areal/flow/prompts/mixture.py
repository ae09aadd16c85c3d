"""A weighted mixture of environments in an order that a position alone decides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from areal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Invariant: `num_prompts` and `weight` do not change while a run and its resumptions go on."""

    name: str
    weight: float
    """Relative share of the prompts; 0 never draws from it."""
    num_prompts: int


class Mixture:
    """The run's order of prompts. Invariant: position n is the same prompt in every run with the same seed.

    Shares are exact, not random: after any number of positions, no environment is a whole prompt ahead of its share
    or behind it. Each position goes, among the environments that are behind their share, to the one that would be a
    whole prompt behind first (one-processor case of proportionate fairness: Baruah, Cohen, Plaxton, Varvel 1996,
    "Proportionate Progress"). Within an environment, every epoch is a new shuffle of all its prompts.
        sources of weight 3 and 1 give a, a, a, b, a, a, a, b, ...
    """

    def __init__(self, sources: Sequence[Source], seed: int | str) -> None:
        active = [source for source in sources if source.weight > 0]
        if not active:
            raise ConfigError("no environment has a weight above 0; give at least one")
        if empty := [source.name for source in active if source.num_prompts == 0]:
            raise ConfigError(f"environment {empty[0]!r} has no training prompts; give it data or weight 0")
        self._sources = {source.name: source for source in active}
        self._weights = _whole_numbers({source.name: source.weight for source in active})
        self._total = sum(self._weights.values())
        self._drawn = dict.fromkeys(self._sources, 0)
        self._seed = seed
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self.position = 0

    def skip_to(self, position: int) -> None:
        """Move on to a position of an earlier run of this mixture; going back is a ValueError."""
        if position < self.position:
            raise ValueError(f"the mixture is at {self.position} and cannot go back to {position}")
        while self.position < position:
            self._draw()

    def next(self) -> tuple[str, int]:
        """Return (environment, index of the prompt in its training split) and move on by one."""
        name = self._draw()
        number = self._drawn[name] - 1
        epoch, offset = divmod(number, self._sources[name].num_prompts)
        return name, self._order(name, epoch)[offset]

    def _draw(self) -> str:
        self.position += 1
        behind = [name for name, w in self._weights.items() if w * self.position > self._drawn[name] * self._total]
        name = min(behind, key=lambda name: (self._drawn[name] + 1) / self._weights[name])
        self._drawn[name] += 1
        return name

    def _order(self, name: str, epoch: int) -> list[int]:
        known = self._orders.get(name)
        if known is None or known[0] != epoch:
            order = list(range(self._sources[name].num_prompts))
            random.Random(f"{self._seed}/{name}/{epoch}").shuffle(order)
            self._orders[name] = known = (epoch, order)
        return known[1]


def _whole_numbers(weights: Mapping[str, float]) -> dict[str, int]:
    """Return whole numbers in exactly the same proportions: sums of rounded shares drift apart in long runs."""
    exact = {name: Fraction(weight) for name, weight in weights.items()}
    scale = lcm(*(fraction.denominator for fraction in exact.values()))
    return {name: int(fraction * scale) for name, fraction in exact.items()}
