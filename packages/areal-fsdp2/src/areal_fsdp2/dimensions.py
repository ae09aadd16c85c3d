"""How many ranks share the work in each way, and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

NAMES = ("pp", "replicate", "shard", "sp", "tp")
"""Dimensions of the mesh, the outermost first: ranks of one machine are neighbours, so the talkative ones are last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Invariant: the product of all sizes but `ep` is the number of ranks; `ep` divides `shard`."""

    pp: int = 1
    """Runs of layers."""
    replicate: int = 1
    """Copies of the sharded weights."""
    shard: int = 1
    """Data-parallel ranks that share one copy of the weights out."""
    sp: int = 1
    """Parts of each sequence."""
    tp: int = 1
    """Slices of each layer."""
    ep: int = 1
    """Shares of each layer's experts among the data-parallel ranks; ranks along `tp` divide each share up."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `NAMES`."""
        return (self.pp, self.replicate, self.shard, self.sp, self.tp)

    @property
    def dp(self) -> int:
        """Ranks that work on different rows."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return prod(self.sizes)

    def place(self, rank: int) -> dict[str, int]:
        """Return where a rank stands along each of `NAMES`."""
        place: dict[str, int] = {}
        for name, size in zip(reversed(NAMES), reversed(self.sizes), strict=True):
            rank, place[name] = divmod(rank, size)
        return place

    def data_rank(self, rank: int) -> int:
        """Return which share of the rows a rank works on, 0..dp-1."""
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def speakers(self) -> list[int]:
        """Return for each data rank the rank that knows its numbers and speaks for those that know the same."""
        last = (self.pp - 1) * self.dp * self.sp * self.tp
        return [last + data * self.sp * self.tp for data in range(self.dp)]
