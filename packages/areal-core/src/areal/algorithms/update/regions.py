"""Where a checkpoint's tensors lie in a module's parameters: what travels to engines has the checkpoint's names.

A parameter of the module need not be one tensor of the checkpoint: transformers stacks the experts of a layer, files
(and engines such as vLLM) hold them one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""First index and size along each dimension."""


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor of the checkpoint within a parameter. Invariant: regions of a parameter cover it once."""

    name: str
    """In the checkpoint."""
    box: Box
    """Where it lies in the parameter; there, dimensions of `index` have size 1 and are no dimensions of the tensor."""
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for axis, (_, size) in enumerate(self.box) if axis not in self.index)


def regions(name: str, shape: tuple[int, ...]) -> list[Region]:
    """Return the checkpoint's tensors that make up a parameter: itself, or the experts that are stacked in it."""
    stacked = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if stacked is None or len(shape) != 3:
        return [Region(name, tuple((0, size) for size in shape))]
    prefix, kind = stacked.groups()
    halves = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    rows = shape[1] // len(halves)
    return [
        Region(f"{prefix}.{expert}.{half}.weight", ((expert, 1), (number * rows, rows), (0, shape[2])), index=(0,))
        for expert in range(shape[0])
        for number, half in enumerate(halves)
    ]


def checkpoint_tensors(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's named parameters as the checkpoint's tensors: themselves, or views of what is stacked.

    A view writes through, as long as the parameter keeps its memory.
    """
    for name, parameter in parameters:
        found = regions(name, tuple(parameter.shape))
        if len(found) == 1:
            yield found[0].name, parameter
            continue
        for region in found:
            view = parameter.detach()[tuple(slice(low, low + size) for low, size in region.box)]
            yield region.name, view.view(region.shape)
