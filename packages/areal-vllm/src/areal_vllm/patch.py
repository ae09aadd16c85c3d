"""The monkey-patch: what vLLM lacks for reinforcement learning, added at run time without touching its source.

vLLM calls `apply` in each of its processes. One row a patch; a row whose target has the method natively stays out of
the way, and a target whose signature has changed is an error that names the patch.
"""

# pyright: reportMissingImports=false
# vLLM has an environment of its own.
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any, Literal

from areal.errors import PluginError
from areal_vllm import environment

MARK = "_areal_patch"
State = Literal["applied", "native", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One attribute of vLLM that is added or wrapped. Invariant: applying it twice is applying it once."""

    target: str
    """``package.module:Class.attribute``, or ``package.module:function``."""
    kind: Literal["add", "wrap"]
    """``add``: only where vLLM has nothing of that name; ``wrap``: around what vLLM has."""
    reason: str
    versions: str
    """Versions of vLLM that need it."""
    needs: Mapping[str, tuple[str, ...]]
    """What the patch relies on: attributes of the same owner, and their first parameters by name."""
    make: Callable[[Any], Any]
    """Gets what is there (None for ``add``) and returns what takes its place."""

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]

    def state(self) -> State:
        """Return whether it is in force in this process; PluginError when the target is not as expected."""
        owner, attribute = self._owner()
        self.verify()
        found = inspect.getattr_static(owner, attribute, None)
        if getattr(found, MARK, False):
            return "applied"
        return "native" if self.kind == "add" and found is not None else "absent"

    def verify(self) -> None:
        """Raise PluginError, naming the patch, when what it relies on has another signature in this vLLM."""
        owner, _ = self._owner()
        for attribute, parameters in self.needs.items():
            function = getattr(owner, attribute, None)
            found = tuple(inspect.signature(function).parameters) if callable(function) else None
            if found is None or found[: len(parameters)] != parameters:
                has = f"has {attribute}({', '.join(found)})" if found is not None else f"has no {attribute}"
                raise PluginError(
                    f"the patch {self.name!r} does not fit vLLM {_version()}: {self.target.rpartition('.')[0]} {has}, "
                    f"and {attribute}({', '.join(parameters)}) is needed; install a vLLM that areal-vllm is tested with"
                )

    def apply(self) -> None:
        if self.state() != "absent":
            return
        owner, attribute = self._owner()
        made = self.make(getattr(owner, attribute, None))
        setattr(made, MARK, True)
        setattr(owner, attribute, made)

    def _owner(self) -> tuple[Any, str]:
        module, _, path = self.target.partition(":")
        try:
            owner: Any = import_module(module)
            *classes, attribute = path.split(".")
            for name in classes:
                owner = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"the patch {self.name!r} does not fit vLLM {_version()}: {error}; "
                "install a vLLM that areal-vllm is tested with"
            ) from error
        return owner, attribute


def apply() -> None:
    """Apply all patches in a process of an AReaL engine; vLLM's entry point ``vllm.general_plugins`` leads here."""
    if environment.is_active():
        _register_transfer()
        for patch in PATCHES:
            patch.apply()


def states() -> Iterator[tuple[Patch, State]]:
    """Yield each patch with its state in this process; PluginError for one that does not fit."""
    for patch in PATCHES:
        yield patch, patch.state()


def _register_transfer() -> None:
    """Make AReaL's way of loading known to vLLM's own weight transfer API."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    from areal_vllm.weights import TRANSFER_BACKEND

    if TRANSFER_BACKEND not in Factory._registry:
        Factory.register_engine(TRANSFER_BACKEND, "areal_vllm.transfer", "StagedWeights")


def _version() -> str:
    import vllm

    return vllm.__version__


def _begin_update(_: Any) -> Callable[..., None]:
    def start_weight_update(worker: Any) -> None:
        worker._areal_weights = None

    return start_weight_update


def _take_weights(_: Any) -> Callable[..., None]:
    def update_weights(worker: Any, update_info: dict[str, Any]) -> None:
        from areal_vllm.weights import tensors_of

        worker._areal_weights = tensors_of(update_info)

    return update_weights


def _end_update(_: Any) -> Callable[..., None]:
    def finish_weight_update(worker: Any) -> None:
        weights, worker._areal_weights = worker._areal_weights, None
        worker.reload_weights(weights_iterator=iter(weights.items()))

    return finish_weight_update


def _init_transfer(_: Any) -> Callable[..., None]:
    def init_weight_transfer_engine(worker: Any, init_info: dict[str, Any]) -> None:
        """Nothing to open: the group with the trainer belongs to the resharder's receiver in the engine's process."""

    return init_weight_transfer_engine


def _pack_heads_after(finalize: Callable[..., None]) -> Callable[..., None]:
    @wraps(finalize)
    def finalize_layerwise_processing(model: Any, *args: Any, **kwargs: Any) -> None:
        from areal_vllm.weights import pack_tied_heads

        finalize(model, *args, **kwargs)
        pack_tied_heads(model)

    return finalize_layerwise_processing


def _keep_logprobs(init: Callable[..., None]) -> Callable[..., None]:
    """Return logprobs of the whole vocabulary at the temperature, as AReaL's `Sampling` says, whatever is cut off."""

    @wraps(init)
    def sampler_init(sampler: Any, logprobs_mode: str = "raw_logprobs", *args: Any, **kwargs: Any) -> None:
        init(sampler, logprobs_mode, *args, **kwargs)
        if logprobs_mode != "processed_logprobs":
            return
        sample = sampler.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            if k is None and p is None:
                return sample(logits, generators, k, p)
            kept = logits.log_softmax(dim=-1)  # a copy: sampling may write into the logits
            return sample(logits, generators, k, p)[0], kept

        sampler.forward = forward

    return sampler_init


def _rewind_generators(bookkeep: Callable[..., Any]) -> Callable[..., Any]:
    """Take back what was drawn for a prompt that a step did only in part, so that it depends on no neighbour.

    vLLM sets the generator's offset back, which only a device's generator has. On a CPU each token is one draw.
    """

    @wraps(bookkeep)
    def bookkeeping_sync(runner: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        batch = runner.input_batch
        discarded = runner.discard_request_mask.np[: batch.num_reqs]
        taken_back: dict[int, Any] = {}
        if runner.device.type == "cpu":
            taken_back = {index: batch.generators[index] for index in list(batch.generators) if discarded[index]}
        for index, generator in taken_back.items():
            request = runner.requests[batch.req_ids[index]]
            generator.manual_seed(request.sampling_params.seed)
            torch.randint(0, 2**31, (len(request.output_token_ids),), generator=generator)
            del batch.generators[index]
        try:
            return bookkeep(runner, *args, **kwargs)
        finally:
            batch.generators.update(taken_back)

    return bookkeeping_sync


_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RELOADS = {"reload_weights": ("self",)}

PATCHES = (
    Patch(
        target=f"{_WORKER}.init_weight_transfer_engine",
        kind="add",
        reason="group initialisation of the update session",
        versions="below 0.17.1",
        needs=_RELOADS,
        make=_init_transfer,
    ),
    Patch(
        target=f"{_WORKER}.start_weight_update",
        kind="add",
        reason="begins an update session",
        versions="below 0.22.1",
        needs=_RELOADS,
        make=_begin_update,
    ),
    Patch(
        target=f"{_WORKER}.update_weights",
        kind="add",
        reason="new weights from memory, between two steps of a running engine",
        versions="below 0.17.1",
        needs=_RELOADS,
        make=_take_weights,
    ),
    Patch(
        target=f"{_WORKER}.finish_weight_update",
        kind="add",
        reason="makes the new weights the running ones",
        versions="below 0.22.1",
        needs=_RELOADS,
        make=_end_update,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing",
        kind="wrap",
        reason="on a CPU a tied LM head keeps a packed copy, which a reload of the embedding does not refresh",
        versions="0.30.0 to 0.32.0",
        needs={"finalize_layerwise_processing": ("model",)},
        make=_pack_heads_after,
    ),
    Patch(
        target="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__init__",
        kind="wrap",
        reason="logprobs under top-k and top-p are those of the whole vocabulary, as the trainer computes them",
        versions="all",
        needs={"__init__": ("self", "logprobs_mode"), "forward_native": ("self", "logits", "generators", "k", "p")},
        make=_keep_logprobs,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        kind="wrap",
        reason="on a CPU a step that ends within the prompt of a request with a seed fails",
        versions="all",
        needs={"_bookkeeping_sync": ("self", "scheduler_output")},
        make=_rewind_generators,
    ),
)
