"""The tracker `jsonl`: one JSON object per step in the run's ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from areal.contracts.options import Options
from areal.contracts.specs import TrackerContext

FILE = "metrics.jsonl"


class JsonlTracker:
    """Invariant: each step stands once, whatever was killed and resumed in between.

    The first step logged decides where this life of the run begins: lines from there on are of a life that a resume
    took back, and go.
    """

    def __init__(self, options: Options | None, context: TrackerContext) -> None:
        self._path = Path(context.run_dir) / FILE
        self._file: TextIO | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": ..., "time": seconds since 1970, metrics...}``; numbers that are not finite are null."""
        if self._file is None:
            self._file = self._open(step)
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **numbers}) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps."""
        self.close()
        self._file = self._open(step + 1)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            kept = self._path.with_suffix(".jsonl.tmp")
            with kept.open("w", encoding="utf-8") as file:
                file.writelines(self._lines_before(step))
            kept.replace(self._path)
        return self._path.open("a", encoding="utf-8")

    def _lines_before(self, step: int) -> Iterator[str]:
        """Yield the whole lines of earlier steps; a line that a kill cut in two is dropped."""
        with self._path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    if json.loads(line)["step"] < step:
                        yield line if line.endswith("\n") else line + "\n"
                except (ValueError, KeyError, TypeError):
                    continue
