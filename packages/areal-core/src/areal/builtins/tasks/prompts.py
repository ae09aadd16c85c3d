"""A split's prompts, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from areal.contracts.messages import Prompt


class LazyPrompts(Sequence[Prompt]):
    """Invariant: `make(index)` depends on nothing but `index`, so the sequence is the same in every process."""

    def __init__(self, size: int, make: Callable[[int], Prompt]) -> None:
        self._indices = range(size)
        self._make = make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self._make(i) for i in self._indices[index]]
        return self._make(self._indices[index])
