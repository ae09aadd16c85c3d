"""The tracker `tensorboard`: event files in the run's folder ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from areal.contracts.options import Options
from areal.contracts.specs import TrackerContext

# What a kill may lose; TensorBoard's own two minutes are longer than many a short run.
FLUSH_S = 10


class TensorBoardTracker:
    """Invariant: steps from the first one logged on replace those of an earlier life of the run."""

    def __init__(self, options: Options | None, context: TrackerContext) -> None:
        self._folder = Path(context.run_dir) / "tensorboard"
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one scalar per metric; a thread of the writer puts them on disk."""
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step, flush_secs=FLUSH_S)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is queued; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
