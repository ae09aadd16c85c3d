"""Where vLLM is installed, what its processes need to see, and a model that never ends an answer early."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measuring.processes import ROOT

PYTHON = ROOT / ".venvs" / "vllm" / "bin" / "python"
CONFIGS = ("config.json", "generation_config.json")


def add_vllm_options(parser: Any, *, max_num_seqs: int, kv_cache_mb: int) -> None:
    """Add what all scripts that run vLLM ask, with a script's own defaults."""
    parser.add_argument("--vllm-python", help="Python that has vLLM and areal-vllm; else .venvs/vllm")
    parser.add_argument("--max-num-seqs", type=int, default=max_num_seqs, help="vLLM: most requests at a time")
    parser.add_argument(
        "--kv-cache-mb", type=int, default=kv_cache_mb, help="vLLM: room for keys and values, each rank"
    )


def vllm_options(args: argparse.Namespace) -> dict[str, int]:
    """Return vLLM's own arguments that the command line asks for."""
    return {"max_num_seqs": args.max_num_seqs, "kv_cache_memory_bytes": args.kv_cache_mb << 20}


def vllm_python(given: str | None = None) -> str:
    """Return the interpreter of an environment with vLLM and areal-vllm; SystemExit when there is none."""
    python = Path(given) if given else PYTHON
    if not python.is_file():
        raise SystemExit(
            f"{python} does not exist; `make test-vllm` makes that environment, --vllm-python names another"
        )
    return str(python.absolute())


def vllm_variables(threads: int) -> dict[str, str]:
    """Return the variables that every side which runs vLLM on a CPU is given, AReaL's or not."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Waiting threads that spin take the cores from everybody else: a factor of 5 to 20.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "HF_HUB_OFFLINE": "1",
        # What areal_vllm sets for itself.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def endless_copy(model: str, folder: Path) -> tuple[str, int]:
    """Make a folder with a model's weights and without its end of text; return it and the size of the vocabulary.

    It has no tokenizer: AReaL's engine would ask that one for the end of text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = sorted(Path(model).glob("*.safetensors*"))
    if not weights or not Path(model, CONFIGS[0]).is_file():
        raise SystemExit(f"{model!r} has no config.json and safetensors files; --model takes a Hugging Face folder")
    for path in weights:
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.absolute())
    for name in CONFIGS:
        config: dict[str, Any] = {}
        if Path(model, name).is_file():
            config = json.loads(Path(model, name).read_text(encoding="utf-8"))
        config.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(folder), json.loads((folder / CONFIGS[0]).read_text(encoding="utf-8"))["vocab_size"]
