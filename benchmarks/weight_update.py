"""Seconds of a weight update by every builtin road, side by side in one run.

    python benchmarks/weight_update.py [--repeats 5] [--engines 1] [--dtype bfloat16] [--layers 30] [--out FILE]
    python benchmarks/weight_update.py --engine vllm [--model FOLDER] [--tensor-parallel 1,2] [--windows 3] [--out FILE]

Without --engine, the tensors have the names and shapes of a 135M-parameter model (SmolLM2-135M) and random values; the
sender is this process, each engine a process of its own that does what the builtin engine does with every tensor:
checksum it and copy it beside the running weights. One update lasts from the call of both sides until the last one is
done. The roads alternate, so that a busy machine slows all of them; the first update of each road (cold: memory is
touched for the first time, the group is made) is shown apart and does not count.

The checksums of both sides are part of an update; `checksum_s` says what one side's cost alone. `cpu_s` is the
processor time of all processes together, which a busy machine changes much less than the seconds on the clock.

With --engine vllm a trainer (the backend torch) sends a model of that size to a real vLLM (areal_vllm), each in a
process of its own in .venvs/vllm: the seconds to send, to stage and of the pause by road, and under a steady load the
tokens that an update costs; for each number of ranks and each way of treating the running requests' cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measuring.processes import new_folder
from measuring.vllm_environment import add_vllm_options, endless_copy, vllm_python
from measuring.vllm_update import DISK, GLOO, SHARED_MEMORY, measure_vllm, random_model

from areal.builtins.resharders.disk import DiskResharder
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, Plan, TensorSpec, checksum

DEADLINE_S = 120.0


@dataclass
class Road:
    name: str
    resharder: Any
    plan: Plan
    sender: Any
    seconds: list[float] = field(default_factory=list)
    """Of each update, the cold one first."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of the same updates, all processes together."""


def specs(num_layers: int, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the tensors of SmolLM2-135M (hidden 576, feed-forward 1536, 9 heads, 3 key heads, tied embedding)."""
    layer = {
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
        "input_layernorm": (576,),
        "post_attention_layernorm": (576,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return tuple(TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items())


def engine(connection: Connection) -> None:
    """Receive what the parent names, until it hangs up; the body of an engine's process."""
    torch.set_num_threads(1)
    receivers: dict[str, Any] = {}
    while True:
        try:
            resharder, plan, member, version = connection.recv()
        except EOFError:
            return
        if plan.uid not in receivers:
            receivers[plan.uid] = resharder.receiver(plan, member)
        began = time.process_time()
        checksums: dict[str, int] = {}
        staged: dict[str, torch.Tensor] = {}
        for name, tensor in receivers[plan.uid].receive(version, DEADLINE_S):
            checksums[name] = checksum(tensor)
            staged[name] = tensor.clone()
        connection.send((checksums, time.process_time() - began))


def make_roads(args: argparse.Namespace, folder: str) -> list[Road]:
    source = Layout(host="here", dtype=args.dtype, tensors=specs(args.layers, args.dtype))
    targets = [Layout(host="here", dtype=args.dtype)] * args.engines
    resharders = {
        "disk": DiskResharder(None, folder),
        "xccl, gloo": XcclResharder(XcclOptions(shared_memory="never"), ""),
        "xccl, shared memory": XcclResharder(XcclOptions(), ""),
    }
    roads: list[Road] = []
    for name, resharder in resharders.items():
        plan = resharder.plan(source, targets)
        roads.append(Road(name, resharder, plan, resharder.sender(plan)))
    if roads[-1].plan.details["road"] != "shared_memory":
        raise SystemExit("this machine's /dev/shm has no room for two copies of the weights")
    return roads


def update(road: Road, version: int, weights: list[tuple[str, torch.Tensor]], engines: list[Connection]) -> None:
    """Publish one version on one road and note its seconds."""
    began, cpu_s = time.perf_counter(), -time.process_time()
    for member, connection in enumerate(engines):
        connection.send((road.resharder, road.plan, member, version))
    receipt = road.sender.send(version, weights, DEADLINE_S)
    for connection in engines:
        if not connection.poll(DEADLINE_S):
            raise SystemExit(f"an engine did not finish version {version} on the road {road.name!r}")
        checksums, engine_cpu_s = connection.recv()
        if checksums != receipt.checksums:
            raise SystemExit(f"version {version} arrived damaged on the road {road.name!r}")
        cpu_s += engine_cpu_s
    road.seconds.append(time.perf_counter() - began)
    road.cpu_seconds.append(cpu_s + time.process_time())


def measure(args: argparse.Namespace, engines: list[Connection]) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    weights = [
        (spec.name, torch.randn(spec.shape, generator=generator).to(dtype)) for spec in specs(args.layers, args.dtype)
    ]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        roads = make_roads(args, folder)
        for version in range(1, args.repeats + 2):
            weights = [(name, tensor.neg_()) for name, tensor in weights]  # so that a stale version is noticed
            for road in roads:
                update(road, version, weights, engines)
        for road in roads:
            road.sender.close()
    began = time.perf_counter()
    for _, tensor in weights:
        checksum(tensor)
    checksum_s = time.perf_counter() - began
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
    return {
        "parameters": sum(tensor.numel() for _, tensor in weights),
        "bytes": num_bytes,
        "engines": args.engines,
        "repeats": args.repeats,
        "cores": os.cpu_count(),
        "load_average": [load_before, os.getloadavg()[0]],
        "checksum_s": round(checksum_s, 4),
        "roads": {road.name: figures(road, roads[0]) for road in roads},
    }


def figures(road: Road, disk: Road) -> dict[str, float]:
    warm, base = road.seconds[1:], disk.seconds[1:]
    return {
        "cold_s": round(road.seconds[0], 4),
        "min_s": round(min(warm), 4),
        "median_s": round(statistics.median(warm), 4),
        "cpu_s": round(min(road.cpu_seconds[1:]), 4),
        "disk_over_this_min": round(min(base) / min(warm), 2),
        "disk_over_this_median": round(statistics.median(base) / statistics.median(warm), 2),
    }


def main() -> None:
    args = arguments()
    report = with_vllm(args) if args.engine == "vllm" else with_stand_ins(args)
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["stand-in", "vllm"], default="stand-in", help="who receives")
    parser.add_argument("--repeats", type=int, default=5, help="updates on each road that count")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--folder", help="where the disk road writes; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    stand_in = parser.add_argument_group("stand-in")
    stand_in.add_argument("--engines", type=int, default=1)
    stand_in.add_argument("--layers", type=int, default=30, help="30: 135M parameters")
    vllm = parser.add_argument_group("vllm")
    vllm.add_argument("--model", help="Hugging Face folder; else random weights of SmolLM2's size")
    vllm.add_argument("--tensor-parallel", type=numbers, default=[1, 2], help="ranks of the engine, with commas")
    vllm.add_argument("--kv-on-update", type=words, default=["keep", "recompute"], help="one of the two, or both")
    vllm.add_argument("--rounds", type=int, default=2, help="how often each road has its turn of --repeats updates")
    vllm.add_argument("--road", choices=[DISK, GLOO, SHARED_MEMORY], default=SHARED_MEMORY, help="under load")
    vllm.add_argument("--windows", type=int, default=3, help="windows of each kind under load; 0: no load")
    vllm.add_argument("--window-s", type=float, default=45.0, help="seconds of a window")
    vllm.add_argument("--updates", type=int, default=3, help="updates in a window")
    vllm.add_argument("--cores", type=int, default=2, help="cores that trainer and engine share")
    add_vllm_options(vllm, max_num_seqs=32, kv_cache_mb=512)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def with_stand_ins(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the roads to processes that only receive."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    engines: list[Connection] = []
    for _ in range(args.engines):
        ours, theirs = context.Pipe()
        context.Process(target=engine, args=(theirs,), daemon=True).start()
        theirs.close()
        engines.append(ours)
    return measure(args, engines)


def with_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the roads from a real trainer to a real vLLM."""
    python = vllm_python(args.vllm_python)
    folder = new_folder(None, "weight_update")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as written:
        made = endless_copy(args.model, folder / "model") if args.model else random_model(Path(written, "model"))
        found = measure_vllm(args, python, made, folder, Path(written))
    print(f"\nlogs: {folder}")
    return {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "load_average": [load_before, os.getloadavg()[0]],
        "configurations": found,
    }


if __name__ == "__main__":
    main()
