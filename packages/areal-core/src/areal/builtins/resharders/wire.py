"""What every road needs: a deadline, the refusals of a plan, and tensors checked against it and cast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch

from areal.contracts.transfer import Layout, Plan, TensorSpec
from areal.errors import TransferFailed

T = TypeVar("T")
# Polls start fine enough for shared memory (one update is some 50 ms) and grow with the wait to spare the CPU.
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.01
POLL_SHARE = 0.05


class Deadline:
    """Invariant: `left_s` never rises and is never negative; `end` may come from another thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - self.elapsed_s)

    def end(self) -> None:
        """Let it pass now."""
        self.seconds = 0.0

    def poll(self, look: Callable[[], T | None], first_s: float = FIRST_POLL_S) -> T | None:
        """Call `look` until it returns something; None when the time is over. `first_s`: the first pauses."""
        began = time.monotonic()
        while (found := look()) is None and self.left_s > 0:
            pause_s = min(max(POLL_SHARE * (time.monotonic() - began), first_s), LAST_POLL_S)
            time.sleep(min(pause_s, self.left_s))
        return found


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name, for example ``bfloat16``; TransferFailed when torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransferFailed(f"the layout names dtype {name!r}, which torch does not have; use a torch dtype's name")
    return dtype


def check_members(source: Layout, targets: Sequence[Layout]) -> None:
    """Raise TransferFailed when no plan can be made: nobody to send to, nothing to send, or several dtypes."""
    if not targets:
        raise TransferFailed("a plan was asked for without an engine to send to; start at least one engine")
    if not source.tensors:
        raise TransferFailed("the trainer's layout names no tensors, so there is nothing to send to the engines")
    dtypes = sorted({target.dtype for target in targets})
    if len(dtypes) > 1:
        raise TransferFailed(
            f"the engines hold weights as {' and '.join(dtypes)}, but one update travels in one dtype;"
            " give all engines the same dtype"
        )
    for name in {dtypes[0], *(spec.dtype for spec in source.tensors)}:
        torch_dtype(name)


def wire_specs(plan: Plan) -> tuple[TensorSpec, ...]:
    """Return the plan's tensors as they travel: floating ones in the receivers' dtype, others as they are."""
    dtype = plan.targets[0].dtype
    return tuple(
        replace(spec, dtype=dtype) if torch_dtype(spec.dtype).is_floating_point else spec
        for spec in plan.source.tensors
    )


def num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def checked(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield each tensor, still in the trainer's dtype, beside how it travels.

    Raises TransferFailed when the trainer's order, shapes or number are not the plan's.
    """
    stream = iter(tensors)
    for spec in specs:
        name, tensor = next(stream, (None, None))
        if tensor is None:
            raise TransferFailed(f"the trainer stopped before {spec.name!r}, which its layout promises")
        if name != spec.name or tuple(tensor.shape) != spec.shape:
            raise TransferFailed(
                f"the trainer sent {name!r} of shape {tuple(tensor.shape)} where its layout promises"
                f" {spec.name!r} of shape {spec.shape}"
            )
        yield spec, tensor.detach()
    if (extra := next(stream, None)) is not None:
        raise TransferFailed(f"the trainer sent {extra[0]!r}, which its layout does not name")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as uint8 [num_bytes], without copying."""
    # torch calls a tensor of one element contiguous whatever its stride, and `view` does not.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
