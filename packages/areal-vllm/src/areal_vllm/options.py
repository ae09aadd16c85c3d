"""What a recipe may say about vLLM: a few options of ours, everything else is vLLM's own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, PositiveInt, model_validator

from areal.contracts.options import STRICT, Options

_SAID_ELSEWHERE = {
    "model": "the recipe's model.path says it",
    "dtype": "the recipe's model.dtype says it",
    "seed": "the recipe's seed says it",
    "logprobs_mode": "AReaL's convention needs processed_logprobs",
    "weight_transfer_config": "AReaL's resharders bring the weights",
    "skip_tokenizer_init": "AReaL never sends text",
    "disable_log_stats": "AReaL reads vLLM's state itself",
    "async_scheduling": "with it a token's version is not that of its step",
    "stream_interval": "with it a token's version is not that of its step",
    "distributed_executor_backend": "AReaL chooses it by the number of ranks",
    "pipeline_parallel_size": "areal-vllm spreads a model by tensor_parallel_size only",
    "nnodes": "a replica lives on one machine; engine.replicas starts several",
}
_REPLICAS = "data_parallel"
"""Begin of the names of vLLM's own replicas, whose processes would wait for each other."""


class VllmOptions(Options):
    """Invariant: a key that is not declared here reaches vLLM's EngineArgs unchanged, and vLLM judges it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(**{**STRICT, "extra": "allow"})

    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to running requests' KV cache when new weights arrive: kept, or recomputed with the new weights.

    New requests never use a prefix that was cached under older weights. A request that vLLM preempted for room is
    recomputed in either case.
    """
    adaptive_batch: bool = True
    """Give vLLM fewer requests at a time when it preempts or queues them, more again when it does not."""
    check_loaded: Literal["first", "always", "never"] = "first"
    """After which updates the weights that vLLM really runs with are read back and compared with what was sent.

    ``first``: after each engine's first update, because what can go wrong (a name, a layout, a packed copy that was
    forgotten) goes wrong at every update.
    """

    tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each layer; not given: the replica's devices when ``resources.infer.parallel`` is tp, else 1."""

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's own options, as the recipe gives them."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _no_argument_of_ours(self) -> VllmOptions:
        for key in self.arguments:
            if key in _SAID_ELSEWHERE:
                raise ValueError(f"{key!r} cannot be set here: {_SAID_ELSEWHERE[key]}")
            if key.startswith(_REPLICAS):
                raise ValueError(f"{key!r} cannot be set here: engine.replicas says it")
        return self
