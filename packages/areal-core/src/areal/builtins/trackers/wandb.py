"""The tracker `wandb`: Weights & Biases; needs the extra ``areal-core[wandb]``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]
from pydantic import ConfigDict

from areal.contracts.options import Options
from areal.contracts.specs import TrackerContext

ID_FILE = "wandb.id"


class WandbOptions(Options):
    """Invariant: what is not named here goes to ``wandb.init`` as it stands."""

    model_config = ConfigDict(extra="allow", frozen=True)

    project: str = "areal"
    entity: str | None = None
    """A team's name; None: the user's own."""


class WandbTracker:
    """Invariant: one run folder is one run on the service, however often it is resumed.

    Whether it is online, offline or disabled is the user's own setting (``wandb offline``, ``WANDB_MODE``).
    """

    def __init__(self, options: WandbOptions | None, context: TrackerContext) -> None:
        options = options or WandbOptions()
        self._run: Any = wandb.init(
            project=options.project,
            entity=options.entity,
            name=context.run_name,
            id=_run_id(Path(context.run_dir)),
            resume="allow",
            dir=context.run_dir,
            config=context.config,
            **(options.model_extra or {}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the numbers to wandb's own process."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until wandb has taken everything; idempotent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _run_id(folder: Path) -> str:
    """Return the id that this run folder has on the service, made when first asked for."""
    file = folder / ID_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12], encoding="ascii")
    return file.read_text(encoding="ascii").strip()
