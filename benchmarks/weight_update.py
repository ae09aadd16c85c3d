"""Seconds of a weight update from a trainer to a real vLLM by every builtin road, side by side in one run.

    python benchmarks/weight_update.py --engine vllm [--model FOLDER] [--tensor-parallel 1,2] [--windows 3] [--out FILE]

A trainer (the backend torch) sends a model of 135M parameters to a real vLLM (areal_vllm), each in a process of its own
in .venvs/vllm: the seconds to send, to stage and of the pause by road, and under a steady load the tokens that an
update costs; for each number of ranks and each way of treating the running requests' cache. What the roads alone cost,
from a trainer of several ranks and for larger models, is weight_sync.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from measuring.processes import new_folder
from measuring.vllm_environment import add_vllm_options, endless_copy, vllm_python
from measuring.vllm_update import DISK, GLOO, SHARED_MEMORY, measure_vllm, random_model


def main() -> None:
    args = arguments()
    report = with_vllm(args)
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm"], default="vllm", help="who receives")
    parser.add_argument("--repeats", type=int, default=5, help="updates on each road that count")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--folder", help="where the disk road writes; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--model", help="Hugging Face folder; else random weights of SmolLM2's size")
    parser.add_argument("--tensor-parallel", type=numbers, default=[1, 2], help="ranks of the engine, with commas")
    parser.add_argument("--kv-on-update", type=words, default=["keep", "recompute"], help="one of the two, or both")
    parser.add_argument("--rounds", type=int, default=2, help="how often each road has its turn of --repeats updates")
    parser.add_argument("--road", choices=[DISK, GLOO, SHARED_MEMORY], default=SHARED_MEMORY, help="under load")
    parser.add_argument("--windows", type=int, default=3, help="windows of each kind under load; 0: no load")
    parser.add_argument("--window-s", type=float, default=45.0, help="seconds of a window")
    parser.add_argument("--updates", type=int, default=3, help="updates in a window")
    parser.add_argument("--cores", type=int, default=2, help="cores that trainer and engine share")
    add_vllm_options(parser, max_num_seqs=32, kv_cache_mb=512)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


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
