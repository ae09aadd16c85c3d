"""Seconds and bytes of a weight update from a trainer of two ranks to one engine, by every road, in one run.

    python benchmarks/weight_sync.py [--sizes 135M,0.6B,1.7B] [--rounds 3] [--repeats 4] [--folder DIR] [--out FILE]

The trainer's ranks hold float32 masters sharded by rows as FSDP2 shards them, the engine bfloat16 parameters in memory
that it has used before; each is a process with one thread. An update lasts from the call of all until the last
parameter of the engine is new (`arrived_s`); `free_s` until both ranks are free again, with their checksums made;
`cpu_s` is the processor time of all three, which a busy machine changes less than the clock's. The engine's own
checksums are compared after each turn, outside the clock; `engine_checksum_s` says what they cost.

Two baselines have no code of AReaL's and no checksums: gathering each parameter whole (DTensor.full_tensor) and saving
on rank 0, and each rank saving its own shards, both with safetensors and fsync, loaded and copied by the engine.
`memcpy` is one thread copying as many bytes from warm memory to warm memory, `bare copies` the same copies as those of
shared memory by the same processes, without anything that makes them a road (measuring/bare_copies.py). An engine that
adopts what arrives (`adopted`, as the engine ``transformers`` does) makes no copy of its own.

The roads take turns of `--repeats` updates, `--rounds` times. The first two updates of a turn are cold (memory touched
for the first time, which is two segments with shared memory; groups made; for deltas the whole model) and do not count;
the first is shown apart. Between two updates a share of the weights changes at random places: 0.4 % and 3 % for the
deltas. What updates by AdamW change, in a model (--model) or in normal weights of deviation 0.02, is measured beside it
(measuring/sync_updates.py says with which gradients).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring.bare_copies import BareResharder
from measuring.sync_models import SIZES, source_of
from measuring.sync_sides import DEADLINE_S
from measuring.sync_updates import sampled_weights, update_share

from areal.builtins.resharders.disk import DiskResharder
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, Plan
from areal.testing.ranks import Ranks, free_rendezvous

NUM_RANKS = 2
NUM_COLD = 2
GATHERED, OWN = "disk, gathered whole on rank 0", "disk, each rank its own shards"
SHARED_MEMORY, BARE = "xccl, shared memory", "bare copies in shared memory"
ADOPTED = f"{SHARED_MEMORY}, adopted"


@dataclass
class Road:
    """One way for the weights, and what was measured on it."""

    name: str
    make: Callable[[str], Any] | None = None
    """The resharder, given a folder; None: a baseline without one."""
    share: float = 0.004
    """Of the weights that change between two updates."""
    adopts: bool = False
    """Whether the engine takes what arrives for its parameters, in place of copying it into them."""
    cold_s: list[float] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Processor seconds of all three processes, the ranks' checksums included."""
    num_bytes: list[int] = field(default_factory=list)


def make_roads() -> list[Road]:
    def xccl(**options: Any) -> Callable[[str], Any]:
        return lambda folder: XcclResharder(XcclOptions(**options), "")

    return [
        Road(GATHERED),
        Road(OWN),
        Road("resharder disk", lambda folder: DiskResharder(None, folder)),
        Road("xccl, gloo", xccl(shared_memory="never", delta="never")),
        Road("xccl, gloo, delta of 0.4 %", xccl(shared_memory="never", delta="always")),
        Road("xccl, gloo, delta of 3 %", xccl(shared_memory="never", delta="always"), share=0.03),
        Road("xccl, gloo, auto, 0.4 %", xccl(shared_memory="never", delta="auto")),
        Road(SHARED_MEMORY, xccl()),
        Road(ADOPTED, xccl(), adopts=True),
        Road(BARE, lambda _: BareResharder()),
    ]


class Bench:
    """Trainer and engine of one size. Invariant: one road is open at a time."""

    def __init__(self, size: str, folder: str) -> None:
        self.source = source_of(SIZES[size].specs(), NUM_RANKS)
        self.target = Layout(host="here", dtype="bfloat16")
        self.memcpy_s: list[tuple[float, float]] = []
        self.engine_checksum_s: list[float] = []
        self._folder = folder
        self._version = 0
        rendezvous = free_rendezvous()
        self.ranks = Ranks(NUM_RANKS, "measuring.sync_sides:Rank", lambda rank: (rank, NUM_RANKS, size, rendezvous))
        self.engine = Ranks(1, "measuring.sync_sides:Engine", lambda _: (size,))
        self._pool = ThreadPoolExecutor(1)

    def turn(self, road: Road, repeats: int) -> None:
        """Make the cold updates on a road and `repeats` that count, and compare what arrived."""
        plan = Plan(uid=road.name, source=self.source, targets=(self.target,))
        if road.make is not None:
            resharder = road.make(self._folder)
            plan = resharder.plan(self.source, [self.target])
            for side in (self.ranks, self.engine):
                side.call("open", resharder, plan)
        checksums: dict[str, int] = {}
        for number in range(NUM_COLD + repeats):
            self._version += 1
            self.ranks.call("change", road.share, self._version, deadline_s=DEADLINE_S)
            checksums = self._update(road, number)
        if not checksums:
            checksums = _joined(self.ranks.call("checksums", plan, deadline_s=DEADLINE_S))
        [(found, seconds)] = self.engine.call("checksums", plan, deadline_s=DEADLINE_S)
        self.engine_checksum_s.append(seconds)
        if road.make is not None:
            for side in (self.engine, self.ranks):
                side.call("close")
        if found != checksums:
            raise SystemExit(f"version {self._version} arrived damaged on the road {road.name!r}")

    def _update(self, road: Road, number: int) -> dict[str, int]:
        path = str(Path(self._folder) / f"v{self._version}")
        began = time.perf_counter()
        if road.name == GATHERED:
            arriving = self._pool.submit(self.engine.call, "load_gathered", path, deadline_s=DEADLINE_S)
            free = self.ranks.call("save_gathered", path, deadline_s=DEADLINE_S)
        elif road.name == OWN:
            arriving = self._pool.submit(self.engine.call, "load_own", path, NUM_RANKS, deadline_s=DEADLINE_S)
            free = self.ranks.call("save_own", path, deadline_s=DEADLINE_S)
        else:
            arriving = self._pool.submit(self.engine.call, "receive", self._version, road.adopts, deadline_s=DEADLINE_S)
            receipts = self.ranks.call("send", self._version, deadline_s=DEADLINE_S)
            free = [spent for spent, _, _ in receipts]
        [(arrived, engine_cpu_s)] = arriving.result()
        for left in Path(self._folder).glob(f"v{self._version}*"):
            left.unlink() if left.is_file() else None
        if number == 0:
            road.cold_s.append(arrived - began)
        elif number >= NUM_COLD:
            road.arrived_s.append(arrived - began)
            road.free_s.append(max(ended for ended, _ in free) - began)
            road.cpu_s.append(engine_cpu_s + sum(cpu_s for _, cpu_s in free))
        if road.make is None:
            return {}
        if number >= NUM_COLD:
            road.num_bytes.append(sum(size for _, _, size in receipts))
        return _joined([checksums for _, checksums, _ in receipts])

    def close(self) -> None:
        self.ranks.close()
        self.engine.close()


def _joined(parts: list[dict[str, int]]) -> dict[str, int]:
    return {name: crc for part in parts for name, crc in part.items()}


def measure(size: str, args: argparse.Namespace) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    roads = [road for road in make_roads() if not args.only or road.name in args.only.split(";")]
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = Bench(size, folder)
        try:
            for number in range(args.rounds):
                for road in roads:
                    print(f"{size}, round {number + 1}: {road.name}; load average {os.getloadavg()[0]:.2f}", flush=True)
                    bench.turn(road, args.repeats)
                    bench.memcpy_s += bench.engine.call("memcpy", args.repeats, deadline_s=DEADLINE_S)[0]
        finally:
            bench.close()
    specs = bench.source.tensors
    num_parameters = sum(_product(spec.shape) for spec in specs)
    memcpy_s, memcpy_cpu_s = map(statistics.median, zip(*bench.memcpy_s, strict=True))
    medians = {road.name: statistics.median(road.arrived_s) for road in roads}
    return {
        "parameters": num_parameters,
        "bytes": 2 * num_parameters,
        "load_average": [load_before, os.getloadavg()[0]],
        "memcpy_s": memcpy_s,
        "memcpy_cpu_s": memcpy_cpu_s,
        "memcpy_gb_per_s": 2 * num_parameters / memcpy_s / 1e9,
        "engine_checksum_s": statistics.median(bench.engine_checksum_s),
        "roads": {road.name: figures(road, medians, memcpy_s, 2 * num_parameters) for road in roads},
    }


def figures(road: Road, medians: dict[str, float], memcpy_s: float, num_bytes: int) -> dict[str, float]:
    found = {
        "cold_s": statistics.median(road.cold_s),
        "min_s": min(road.arrived_s),
        "arrived_s": medians[road.name],
        "free_s": statistics.median(road.free_s),
        "cpu_s": statistics.median(road.cpu_s),
        "share_of_memcpy": memcpy_s / medians[road.name],
    }
    for label, baseline in (("over_gathered", GATHERED), ("over_own_shards", OWN), ("over_bare", BARE)):
        if baseline in medians:
            found[label] = medians[baseline] / medians[road.name]
    if road.num_bytes:
        found["model_over_sent_bytes"] = num_bytes / statistics.median(road.num_bytes)
    return found


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def print_table(size: str, found: dict[str, Any]) -> None:
    speed, cpu_s = found["memcpy_gb_per_s"], found["memcpy_cpu_s"]
    print(f"\n{size}: {found['parameters']:,} parameters, memcpy {speed:.1f} GB/s ({cpu_s:.3f} processor seconds)")
    names = ("cold_s", "min_s", "arrived_s", "free_s", "cpu_s", "share_of_memcpy")
    names += ("over_gathered", "over_own_shards", "over_bare")
    print(f"{'':34}" + "".join(f"{name:>17}" for name in (*names, "bytes: 1 /")))
    for road, row in found["roads"].items():
        cells = [f"{row[name]:17.3f}" if name in row else f"{'-':>17}" for name in names]
        print(f"{road:34}" + "".join(cells) + f"{row.get('model_over_sent_bytes', 1.0):17.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="135M,0.6B,1.7B", help=f"of {', '.join(SIZES)}, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each road")
    parser.add_argument("--repeats", type=int, default=4, help="updates of a turn that count")
    parser.add_argument("--only", help="names of roads, with semicolons")
    parser.add_argument("--update-parameters", type=int, default=4_000_000, help="of the real updates; 0: none")
    parser.add_argument("--model", help="Hugging Face folder for the real updates; else normal weights")
    parser.add_argument("--folder", help="where the disk roads write; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        raise SystemExit(f"there is no size {unknown[0]!r}; there are {', '.join(SIZES)}")
    report: dict[str, Any] = {"cores": os.cpu_count(), "sizes": {}}
    if args.update_parameters:
        weights = sampled_weights(args.model, args.update_parameters)
        report["updates"] = {f"{rate:g}": update_share(weights, 5, rate) for rate in (1e-6, 1e-5)}
        for rate, found in report["updates"].items():
            share, ratio = found["changed_share"], found["model_over_delta_bytes"]
            print(f"AdamW at {rate}: {share:.2%} of words change, a delta is 1/{ratio:.0f} of the bytes")
    for size in sizes:
        report["sizes"][size] = measure(size, args)
        print_table(size, report["sizes"][size])
        if args.out:
            args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
