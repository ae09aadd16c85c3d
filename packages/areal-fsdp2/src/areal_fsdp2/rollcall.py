"""Which of the trainer's ranks are gone; asked when an exchange between them has failed or does not end."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store

ANSWER_S = 10.0
"""Who looks whether there is a call more often than this is there."""
POLL_S = 0.2
CALLED = "called"


class RollCall:
    """Invariant: a rank that calls, or answers in time, is not missing."""

    def __init__(self, name: str) -> None:
        """`name`: the same on every rank, and used once."""
        self._store = PrefixStore(f"areal/roll-call/{name}", _get_default_store())

    def is_on(self) -> bool:
        """Whether some rank has called, or rank 0, which keeps the list, is gone: then `missing` is next."""
        try:
            return self._store.check([CALLED])
        except RuntimeError:
            return True

    def missing(self) -> list[int]:
        """Call all ranks, be there, and return those that are not after ANSWER_S at most."""
        end = time.monotonic() + ANSWER_S
        try:
            self._store.set(CALLED, "")
            self._store.set(str(dist.get_rank()), "")
            while missing := [rank for rank in range(dist.get_world_size()) if not self._store.check([str(rank)])]:
                if time.monotonic() > end:
                    break
                time.sleep(POLL_S)
            return missing
        except RuntimeError:
            return [0]
