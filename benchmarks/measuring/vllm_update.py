"""What a weight update costs a running vLLM: seconds of each part by resharder, and tokens that are not made."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal.builtins.hooks import areal_resharders
from areal.builtins.quiet import no_progress_bar
from areal.builtins.resharders.disk import DiskOptions
from areal.builtins.resharders.xccl import XcclOptions
from areal.contracts.transfer import Layout, Phase, Transfer
from measuring.curve import table
from measuring.peer import Peer
from measuring.vllm_environment import vllm_options, vllm_variables

DISK, GLOO, SHARED_MEMORY = "disk", "xccl, gloo", "xccl, shared memory"
STEADY_S, BETWEEN_S = 10.0, 10.0
"""Time for the load to become steady before the first window, and again before each window."""
DEADLINE_S = 120.0
NOTHING, STAGED, UPDATED = "without updates", "staged, not committed", "updated"
WINDOWS = (NOTHING, STAGED, UPDATED)


@dataclass
class Pair:
    """A trainer and an engine that run. Invariant: each version is sent once, whole, and verified."""

    trainer: Peer
    engine: Peer
    source: Layout
    target: Layout
    folder: Path
    """Where the disk road writes."""
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def road(self, name: str) -> Transfer:
        """Return a new plan on one of the three roads; its first update is cold."""
        component = {found.name: found for found in areal_resharders()}["disk" if name == DISK else "xccl"]
        options = {
            DISK: DiskOptions(folder=str(self.folder)),
            GLOO: XcclOptions(shared_memory="never"),
            SHARED_MEMORY: XcclOptions(),
        }[name]
        plan = component.load()(options, "").plan(self.source, [self.target])
        if name == SHARED_MEMORY and plan.details["road"] != "shared_memory":
            raise SystemExit("this machine's /dev/shm has no room for two copies of the weights")
        return Transfer(
            phase="stage", version=0, resharder=component, options=options, plan=plan, deadline_s=DEADLINE_S
        )

    def update(self, road: Transfer, *, commit: bool = True) -> dict[str, float]:
        """Bring the next version to the engine and return the seconds of the parts, and its size."""
        self.trainer.ask("change")
        transfer = replace(road, version=next(self.versions))
        began = time.perf_counter()
        self.engine.tell("stage", transfer)
        self.trainer.tell("send", transfer)
        sent, send_s = self.trainer.hear(DEADLINE_S)
        received, stage_s = self.engine.hear(DEADLINE_S)
        if received.checksums != sent.checksums:
            raise SystemExit(f"version {transfer.version} arrived damaged")
        phase: Phase = "commit" if commit else "rollback"
        method = "commit" if commit else "roll_back"
        pause = self.engine.ask(method, replace(transfer, phase=phase), deadline_s=DEADLINE_S) or {}
        parts = {"send_s": send_s, "stage_s": stage_s, **pause}
        return {**parts, "update_s": time.perf_counter() - began, "megabytes": received.num_bytes / 1e6}


def measure_vllm(
    args: argparse.Namespace, python: str, model: tuple[str, int], logs: Path, written: Path
) -> dict[str, Any]:
    """Measure every asked combination of ranks and cache policy, one after the other; return all figures.

    `model`: a folder without end of text, and the size of its vocabulary; `written`: a folder for the disk road.
    """
    report: dict[str, Any] = {}
    for ranks, kv in itertools.product(args.tensor_parallel, args.kv_on_update):
        label = f"tensor parallel {ranks}, {kv}"
        print(f"\n{label}; load average {os.getloadavg()[0]:.2f}", flush=True)
        options = {"tensor_parallel_size": ranks, "kv_on_update": kv, **vllm_options(args)}
        log = logs / f"{ranks}-{kv}"
        with pair(args, python, model, options, log) as ends:
            both = Pair(*ends, folder=written / "weights")
            roads = by_road(both, args)
            print(table(roads), flush=True)
            cost = under_load(both, args) if args.windows else {}
            print("\n".join(f"  {name}: {value:.3f}" for name, value in cost.items()), flush=True)
        report[label] = {"roads": roads, "under_load": cost, "load_average": os.getloadavg()[0]}
    return report


def random_model(folder: Path) -> tuple[str, int]:
    """Write a model with random weights and without end of text; return its folder and the size of its vocabulary.

    It is SmolLM2-135M but for 8 query and 4 key heads in place of 9 and 3, which two ranks cannot share out; both have
    134,515,008 parameters.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with no_progress_bar():
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder), config.vocab_size


@contextmanager
def pair(
    args: argparse.Namespace, python: str, model: tuple[str, int], options: Mapping[str, Any], logs: Path
) -> Iterator[tuple[Peer, Peer, Layout, Layout]]:
    """Start a trainer and an engine on the same cores, one thread each; return both and how their weights lie."""

    def start(name: str) -> Peer:
        variables, log = vllm_variables(threads=1), logs / f"{name}.log"
        return Peer(python, "measuring.update_sides", [name], log=log, cores=args.cores, environment=variables)

    folder, vocab_size = model
    with start("trainer") as trainer, start("engine") as engine:
        source = trainer.ask(folder, args.dtype)
        yield trainer, engine, source, engine.ask(folder, args.dtype, dict(options), vocab_size)


def by_road(both: Pair, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure updates of an idle engine; the roads take turns, and the first update after each turn does not count.

    A backend has one sender at a time, so each turn begins cold: the memory is new, the group is made.
    """
    both.update(both.road(DISK))  # an engine's very first update reads all weights back
    done: dict[str, list[dict[str, float]]] = {DISK: [], GLOO: [], SHARED_MEMORY: []}
    cold: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, updates in done.items():
            road = both.road(name)
            first = both.update(road)
            cold.setdefault(name, first["update_s"])
            updates += (both.update(road) for _ in range(args.repeats))
    medians = {
        name: {part: statistics.median(update[part] for update in updates) for part in updates[0]}
        for name, updates in done.items()
    }
    disk = medians[DISK]
    return {
        name: {
            **parts,
            "cold_update_s": cold[name],
            **{f"disk_over_this_{part}": disk[part] / parts[part] for part in ("send_s", "stage_s", "update_s")},
        }
        for name, parts in medians.items()
    }


def under_load(both: Pair, args: argparse.Namespace) -> dict[str, float]:
    """Compare windows of steady generation without updates, with versions that are only staged, and with updates."""
    both.engine.ask("work", args.max_num_seqs)
    road = both.road(args.road)
    both.update(road)
    time.sleep(STEADY_S)
    rates: dict[str, list[float]] = {kind: [] for kind in WINDOWS}
    parts: list[dict[str, float]] = []
    for _ in range(args.windows):
        for kind in WINDOWS:
            time.sleep(BETWEEN_S)
            number = 0 if kind == NOTHING else args.updates
            rate, updates = window(both, road, args.window_s, number, commit=kind == UPDATED)
            print(f"  {kind:22} {rate:7.1f} tokens/s  load average {os.getloadavg()[0]:.2f}", flush=True)
            rates[kind].append(rate)
            parts += updates if kind == UPDATED else []
    both.engine.ask("work", 0)
    return cost(rates, parts, args.window_s / args.updates)


def window(both: Pair, road: Transfer, seconds: float, number: int, *, commit: bool) -> tuple[float, list[Any]]:
    """Return the tokens per second of a window with so many updates, evenly spread, and the updates' parts."""
    began = time.perf_counter()
    first_at, first = both.engine.ask("tokens")
    updates: list[dict[str, float]] = []
    for index in range(number):
        until(began + index * seconds / number)
        updates.append(both.update(road, commit=commit))
    if time.perf_counter() > began + seconds:
        raise SystemExit(f"{number} updates take longer than {seconds:g} s; use fewer --updates or a longer --window-s")
    until(began + seconds)
    last_at, last = both.engine.ask("tokens")
    return (last - first) / (last_at - first_at), updates


def until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def cost(
    rates: Mapping[str, Sequence[float]], parts: Sequence[Mapping[str, float]], every_s: float
) -> dict[str, float]:
    """Return what an update every `every_s` seconds costs, in tokens that were not made.

    `rates`: tokens per second of each round's window of each kind; windows of one round are compared.
    """
    medians = {f"{part}_under_load": statistics.median(update[part] for update in parts) for part in parts[0]}

    def lost(before: str, after: str) -> float:
        pairs = zip(rates[before], rates[after], strict=True)
        return every_s * statistics.median(one - other for one, other in pairs)

    return {
        **{f"tokens_per_s, {kind}": statistics.median(found) for kind, found in rates.items()},
        **{name: value for name, value in medians.items() if name.endswith("_s_under_load")},
        "seconds from update to update": every_s,
        "tokens lost in a pause (rate x pause)": statistics.median(rates[NOTHING]) * medians["pause_s_under_load"],
        "tokens lost by an update, all in all": lost(NOTHING, UPDATED),
        "of these by sending and staging": lost(NOTHING, STAGED),
        "of these by pause and cache": lost(STAGED, UPDATED),
    }
