"""The order of collectives: what this process's groups have begun, as torch's flight recorder has noted it.

The recorder is part of the groups: it sees every thread, and what FSDP, DTensor and checkpoints ask for as well. It
keeps the last 2000, or as many as TORCH_FR_BUFFER_SIZE says.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal.errors import ConfigError

EVERY_S = 2.0
"""How often a file is written, if there is something new."""
CLOSE_S = 10.0
"""How long `close` waits for the last writing."""
UNEVEN = ("gather", "scatter", "all_to_all")
"""Collectives of which each rank has sizes of its own: one has all parts, or each sends what it has."""

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call of a group on this rank. Invariant: all ranks of a group give it the same number and name."""

    place: int
    """Among all that this process has begun."""
    group: str
    name: str
    """As ``gloo:all_gather``."""
    number: int
    """Within the group; calls between two ranks are counted by themselves."""
    is_between_two: bool
    inputs: Sizes
    outputs: Sizes
    thread: int
    """Of the caller, as `threading.get_ident` says."""

    def __str__(self) -> str:
        """Return what all ranks of the group have alike, unless it is between two of them."""
        called = f"{self.group} {'p2p ' if self.is_between_two else ''}{self.number} {self.name}"
        if self.name.rpartition(":")[2] in UNEVEN:
            return called
        return f"{called} {_written(self.inputs)} -> {_written(self.outputs)}"


def collectives() -> list[Collective]:
    """Return what has been begun, the oldest first, as far as the recorder goes back."""
    recorder: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
    entries: list[dict[str, Any]] = json.loads(recorder._dump_fr_trace_json(True, False)).get("entries", [])
    if hasattr(recorder, "_dump_nccl_trace_json"):  # nccl's groups have a recorder of their own
        entries += json.loads(recorder._dump_nccl_trace_json(True, False)).get("entries", [])
    return [_collective(entry) for entry in sorted(entries, key=lambda entry: entry["time_created_ns"])]


class OrderFile:
    """A file that says in which order collectives were begun, for comparing ranks that wait for each other.

    Invariant: the file is whole, and old by no more than `EVERY_S`, also while a collective does not end.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Begin to write ``folder/name.txt``; ConfigError where that cannot be."""
        self._path = folder / f"{name}.txt"
        self._written: list[str] = []
        self._is_closing = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            reason = "it is a file" if folder.is_file() else error.strerror
            raise ConfigError(
                f"backend.record_collectives={str(folder)!r} cannot be written to ({reason}); name a folder that every "
                "rank can make and write to, or leave the option out"
            ) from error
        self._thread = threading.Thread(target=self._run, name="areal-record", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what has come last. Idempotent."""
        self._is_closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(EVERY_S)
            with suppress(OSError):  # training is worth more than its record
                self._write()

    def _write(self) -> None:
        lines = [str(collective) for collective in collectives()]
        if lines == self._written and lines:
            return
        unfinished = self._path.with_name(f".{self._path.name}.new")
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        unfinished.replace(self._path)
        self._written = lines


def _collective(entry: dict[str, Any]) -> Collective:
    return Collective(
        place=entry["record_id"],
        group=":".join(filter(None, entry["process_group"])),
        name=entry["profiling_name"],
        number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        is_between_two=entry["is_p2p"],
        inputs=_sizes(entry["input_sizes"]),
        outputs=_sizes(entry["output_sizes"]),
        thread=int(entry["thread_id"]),
    )


def _sizes(found: list[list[int]]) -> Sizes:
    return tuple(tuple(size) for size in found)


def _written(sizes: Sizes) -> str:
    return " ".join("x".join(map(str, size)) or "1" for size in sizes) or "-"
