"""What a run has written so far, read while it goes on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any


class WrittenRun:
    """The only run below a folder. Invariant: nothing of it is changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def path(self) -> Path:
        """The run's own folder; FileNotFoundError while there is none."""
        found = [config.parent for config in self._folder.glob("runs/*/config.yaml")]
        if not found:
            raise FileNotFoundError(f"no run in {self._folder}")
        return found[0]

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return what the journal says; nothing while there is none."""
        try:
            path = self.path / "journal.sqlite"
            database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)
        except (FileNotFoundError, sqlite3.OperationalError):
            return []
        try:
            return database.execute(query, values).fetchall()
        except sqlite3.OperationalError:
            return []
        finally:
            database.close()

    def last_step(self) -> int:
        return (self.ask("SELECT max(step) FROM steps") or [(0,)])[0][0] or 0

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; -1 while there is none."""
        found: int | None = (self.ask("SELECT max(step) FROM checkpoints") or [(None,)])[0][0]
        return -1 if found is None else found

    @property
    def has_begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.newest_checkpoint() >= 0

    def num_samples(self) -> int:
        return (self.ask("SELECT count(*) FROM trajectories") or [(0,)])[0][0]

    def rewards(self) -> list[float]:
        """Return the mean reward of each step, in order."""
        query = "SELECT json_extract(metrics, '$.\"reward/mean\"') FROM steps ORDER BY step"
        return [reward for (reward,) in self.ask(query)]

    def newest_metrics(self, *names: str) -> dict[str, float]:
        """Return these metrics of the last step, as far as it has them."""
        columns = ", ".join(f"json_extract(metrics, '$.\"{name}\"')" for name in names)
        rows = self.ask(f"SELECT {columns} FROM steps ORDER BY step DESC LIMIT 1")
        pairs = zip(names, rows[0], strict=True) if rows else ()
        return {name: value for name, value in pairs if value is not None}
