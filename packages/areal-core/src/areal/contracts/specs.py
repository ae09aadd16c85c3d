"""What every component of a kind is told: the model, the training numbers, the context it runs in.

The recipe's blocks ``model`` and ``training`` are these classes; pydantic checks them when a recipe is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from areal.contracts.options import STRICT

if TYPE_CHECKING:
    from areal.contracts.accelerator import Accelerator

Parallel = Literal["dp", "tp", "pp"]
"""How devices share a model: each has a copy (dp), slices of each layer (tp), or a run of layers (pp)."""
Dtype = Literal["float32", "bfloat16", "float16"]
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Invariant: trainer and engines load the same `path`."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str = ""
    """For people; the run's name when none is given."""
    path: str = ""
    """An HF folder, a hub id, or a name that `areal models` lists; empty: a tiny model made from the run's seed."""
    dtype: Dtype = "float32"
    """What engines hold and what travels to them; the trainer's own precision is `training.amp`."""
    type: Literal["dense", "moe"] = "dense"
    """``moe``: a mixture of experts."""
    num_experts: NonNegativeInt = 0
    """Experts of each layer when `type` is moe; 0: what the model's own configuration says."""
    top_k: NonNegativeInt = 0
    """Experts of each token when `type` is moe; 0: what the model's own configuration says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpSpec:
    """Invariant: master weights stay float32 whatever the compute dtype."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    enabled: bool = False
    """Compute in `dtype` instead of float32."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    """What matrix products are computed in."""
    loss_scale: Literal["dynamic"] | PositiveFloat = "dynamic"
    """For fp16 only: ``dynamic`` or a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSpec:
    """Supervised steps on reference answers before the first rollout. Invariant: `steps` 0 does nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    steps: NonNegativeInt = 0
    """Supervised steps; 0: no supervised warm-up."""
    batch_size: PositiveInt = 256
    """Prompts with reference answers per supervised step."""
    learning_rate: PositiveFloat = 2e-3
    """Constant rate of the supervised steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Invariant: the numbers here decide the update; how rows are packed never does."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    batch_size: PositiveInt = 32
    """Prompts (groups) per training step."""
    minibatches: PositiveInt = 1
    """Optimizer updates per step; with more than 1, proximal logprobs take a forward pass if the algorithm asks."""
    max_steps: PositiveInt = 1000
    """Training steps of the whole run."""
    learning_rate: PositiveFloat = 1e-5
    """The highest rate of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at `min_lr_ratio` at `max_steps`."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer updates over which the rate rises linearly from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of `learning_rate` that is left at the end of a linear or cosine schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    grad_clip: NonNegativeFloat = 1.0
    """Global gradient norm; 0 does not clip."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of one packed micro-batch; a longer row is a micro-batch of its own."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    amp: AmpSpec = field(default_factory=AmpSpec)
    """Automatic mixed precision."""
    warmup: WarmupSpec = field(default_factory=WarmupSpec)
    """Supervised steps on reference answers before the first rollout."""
    step_timeout_s: PositiveFloat = 3600.0
    """Seconds for a training step, or for writing or reading a checkpoint, after which the trainer is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParallel:
    """How a mixture of experts is spread. Invariant: a dense model never reads it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    expert: Parallel = "dp"
    """How the trainer spreads expert layers when `model.type` is moe."""
    other: Parallel = "tp"
    """How the trainer spreads all other layers when `model.type` is moe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDevices:
    """What a recipe says about the trainer's devices. Invariant: the backend decides what else it takes to spread."""

    world_size: int = 1
    """Ranks, one device each."""
    per_node: int = 1
    """Ranks on each machine; ranks of one machine are neighbours."""
    parallel: Parallel = "dp"
    """``resources.train.parallel``, for a dense model."""
    layers: LayerParallel = field(default_factory=LayerParallel)
    """The block ``parallel``, for a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """Invariant: all ranks of one trainer get equal values but `rank`."""

    model: ModelSpec
    training: TrainingSpec
    accelerator: Accelerator
    seed: int
    rank: int = 0
    devices: TrainerDevices = field(default_factory=TrainerDevices)
    rendezvous: str = ""
    """``host:port`` of the trainer's own process group; empty for one rank."""
    role: Literal["actor", "critic"] = "actor"
    """``critic``: the model gives a value for each trained token in place of its logprob; see `Values`."""

    @property
    def world_size(self) -> int:
        return self.devices.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Invariant: `name` is unique among the run's workers, a restarted replica gets a new one."""

    model: ModelSpec
    accelerator: Accelerator
    name: str
    seed: int
    log_dir: str = ""
    """Folder for log files of processes the engine starts itself."""
    devices: int = 1
    """Devices of this replica; on the CPU as many ranks as on other devices."""
    parallel: Parallel = "dp"
    """How they share the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContext:
    """Invariant: trackers write only below `run_dir`, or to their own service."""

    run_name: str
    run_dir: str
    config: dict[str, Any]
    """The resolved recipe as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentContext:
    """Invariant: the same name, seed and options give the same prompts in the same order."""

    name: str
    seed: int
