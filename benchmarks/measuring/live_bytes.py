"""How many bytes of tensors are alive, operation by operation; fake tensors, mere sizes, count as real ones."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRAPPERS = (DTensor, AsyncCollectiveTensor)


class LiveBytes(TorchDispatchMode):
    """Counts each storage from the operation that returns it until nobody holds it any more.

    Not seen: what an operation allocates and frees inside itself, and storages that are resized in place, as FSDP2
    does, unless `count` is called again. What a wrapper (DTensor) holds is counted when it is worked on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.largest = 0
        """Bytes of the largest storage that was new since `restart`."""
        self._sizes: weakref.WeakKeyDictionary[UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def count(self, *tensors: Tensor) -> None:
        """Count the storages of tensors that were there before, or that were resized."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (size := self._sizes.get(storage)) is None:
                size = self._sizes[storage] = [0]
                weakref.finalize(storage, self._gone, size)
            if storage.nbytes() != size[0]:
                self.now += storage.nbytes() - size[0]
                size[0] = storage.nbytes()
                self.peak = max(self.peak, self.now)
                self.largest = max(self.largest, size[0])

    def _gone(self, size: list[int]) -> None:
        self.now -= size[0]

    def restart(self) -> int:
        """Return the peak since the last call; the next one counts from what is alive now."""
        peak, self.peak, self.largest = self.peak, self.now, 0
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it returns."""
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # it comes again with what is inside
        result = func(*args, **(kwargs or {}))
        self.count(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result
