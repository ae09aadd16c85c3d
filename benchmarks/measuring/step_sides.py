"""The sides of train_vs_trl.py: which processes each has, what they are given, and what a step of theirs came to."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from areal.builtins.accelerators.cpu import thread_environment
from areal.testing.ranks import free_rendezvous
from measuring.peer import START_S, Peer
from measuring.trl_environment import trl_variables

TRL = "trl"
ENDLESS = 1_000_000
"""TRL wants to know how many steps there will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to make an update. Invariant: all sides of a run use the same number of threads in total."""

    name: str
    backend: str
    processes: int
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The backend's own, where they are not its defaults."""


SIDES = (
    Side(name="TRL", backend=TRL, processes=1),
    Side(name="AReaL fsdp2", backend="fsdp2", processes=1),
    Side(name="AReaL torch", backend="torch", processes=1),
    Side(name="TRL x 2", backend=TRL, processes=2),
    Side(name="AReaL fsdp2 x 2", backend="fsdp2", processes=2),
)
COPIES = Side(name="AReaL fsdp2 copied", backend="fsdp2", processes=2, options={"replicate": 2})
"""When asked for: each process holds all weights, as TRL's do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all sides are given. Invariant: a step of any side trains on the same rows with the same optimizer."""

    model: str
    batches: Mapping[str, str]
    """The file of each case."""
    groups: int
    group_size: int
    micro_batch_rows: int
    """TRL's, for each process."""
    micro_batch_tokens: int
    """Ours, for each process."""
    max_tokens: int
    """Of the longest answer."""
    learning_rate: float
    bf16: bool
    seed: int

    def job(self, side: Side, rank: int, cores: int, rendezvous: str, folder: Path) -> dict[str, Any]:
        """Return what one process is told; names that TRL's settings share with vs_trl.py are those of its cases."""
        rows = self.groups * self.group_size
        return {
            "model": self.model,
            "batches": dict(self.batches),
            "backend": side.backend,
            "options": dict(side.options),
            "processes": side.processes,
            "rank": rank,
            "rendezvous": rendezvous,
            "threads": cores // side.processes,
            "learning_rate": self.learning_rate,
            "bf16": self.bf16,
            "seed": self.seed,
            "micro_batch_tokens": self.micro_batch_tokens,
            "accumulation": rows // side.processes // self.micro_batch_rows,
            "batch_size": self.groups,
            "group_size": self.group_size,
            "steps": ENDLESS,
            "max_new_tokens": self.max_tokens,
            "schedule": "constant",
            "lr_warmup_steps": 0,
            "folder": str(folder),
        }


class Running:
    """A side's processes. Invariant: all of them are told the same, and each answers before they are told more."""

    def __init__(self, side: Side, work: Work, *, trl_python: str, wait_policy: str, cores: int, folder: Path) -> None:
        """Start them; `wait` must return before they are told anything."""
        self.side = side
        self._peers: list[Peer] = []
        own = folder / side.name.replace(" ", "-")
        rendezvous = free_rendezvous()
        is_trl = side.backend == TRL
        for rank in range(side.processes):
            variables = variables_of(side, rank, cores, rendezvous, wait_policy)
            self._peers.append(
                Peer(
                    trl_python if is_trl else sys.executable,
                    "measuring.step_trl" if is_trl else "measuring.step_areal",
                    log=own / f"log-{rank}",
                    cores=cores,
                    environment=variables,
                )
            )
            self._peers[-1].tell(work.job(side, rank, cores, rendezvous, own))

    def wait(self) -> None:
        """Return when all processes have loaded the model."""
        for peer in self._peers:
            peer.hear(START_S)

    def ask(self, *question: Any, deadline_s: float) -> list[Any]:
        for peer in self._peers:
            peer.tell(*question)
        return [peer.hear(deadline_s) for peer in self._peers]

    def step(self, case: str, deadline_s: float) -> dict[str, float]:
        """Make an update; `s` is from the first process's beginning to the last one's end, `cpu_s` of all of them."""
        found = self.ask("step", case, deadline_s=deadline_s)
        return {
            "s": max(one["ended"] for one in found) - min(one["began"] for one in found),
            "cpu_s": sum(one["cpu_s"] for one in found),
            "loss": found[0]["loss"],
            "grad_norm": found[0]["grad_norm"],
        }

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def variables_of(side: Side, rank: int, cores: int, rendezvous: str, wait_policy: str) -> dict[str, str]:
    """Return a process's environment: a share of the cores as AReaL gives it, or as TRL's users set it."""
    threads = cores // side.processes
    if side.backend != TRL:
        return thread_environment(threads)
    variables = trl_variables(threads, wait_policy) | {"TRL_EXPERIMENTAL_SILENCE": "1"}
    if side.processes == 1:
        return variables
    host, port = rendezvous.split(":")
    return variables | {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(side.processes),
        "LOCAL_WORLD_SIZE": str(side.processes),
        "ACCELERATE_USE_CPU": "true",
    }


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    """Return a Hugging Face folder's parameters by name, float32."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def moved_apart(first: str, folders: Sequence[str]) -> list[float]:
    """Return for each folder how far its weights are from those of the first one, over how far these moved.

    `first`: the folder that all of them began with. SystemExit where a folder lacks a parameter or has others.
    """
    initial = weights_of(first)
    reference = weights_of(folders[0])
    moved = distance(initial, reference)
    return [distance(reference, weights_of(folder)) / moved for folder in folders]


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        raise SystemExit(f"parameters with other names: {sorted(one.keys() ^ other.keys())[:6]}")
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5
