"""What a recipe may say. The blocks ``model``, ``training`` and ``sampling`` are the contracts' own classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from areal.contracts.messages import Sampling
from areal.contracts.options import STRICT
from areal.contracts.specs import LayerParallel, ModelSpec, Parallel, TrainerDevices, TrainingSpec

Processes = Annotated[int, Field(gt=0, le=1024)]
AUTO = "auto"
"""The name that leaves the choice of a component to the run."""


class Block(BaseModel):
    """A block of the recipe. Invariant: frozen, and every key it does not know is an error."""

    model_config = STRICT


class Choice(BaseModel):
    """A component's name and its own options. Invariant: core reads no key it has not declared.

    Undeclared keys are the component's options; their owner validates them (`Component.parse_options`).
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def options(self) -> dict[str, Any]:
        """The component's own keys, as the recipe gives them."""
        return dict(self.model_extra or {})


class DeviceGroup(Block):
    """Devices of one side of the run. Invariant: `total` is at least 1 and agrees with every number given."""

    num_gpus: NonNegativeInt = 0
    """Devices in all, of whatever kind `device` names; 0: `num_nodes` x `gpus_per_node`, or 1."""
    num_nodes: PositiveInt = 1
    """Machines that the devices are spread over evenly."""
    gpus_per_node: NonNegativeInt = 0
    """Devices on each machine; 0: `num_gpus` / `num_nodes`."""
    parallel: Parallel = "dp"
    """How these devices share the work: dp (copies), tp (slices of each layer), pp (runs of layers)."""

    @property
    def total(self) -> int:
        """Devices in all."""
        return self.num_gpus or self.num_nodes * (self.gpus_per_node or 1)


class Resources(Block):
    """Invariant: training and inference are never on a device at the same time."""

    train: DeviceGroup = Field(default_factory=DeviceGroup)
    """Devices of the trainer."""
    infer: DeviceGroup = Field(default_factory=DeviceGroup)
    """Devices of all engine replicas together, shared out evenly among them."""
    shared: bool = False
    """Trainer and engines use the same device in turn: each gives its memory to the other."""


class EnvironmentChoice(Choice):
    """One task of the mixture. Invariant: `name` is never empty; further keys are the environment's own options."""

    name: str = ""
    """Name in metrics and in the journal, unique in the list; empty: the same as `type`."""
    type: str
    """A registered environment, or a class of yours as `package.module:Class`."""
    weight: NonNegativeFloat = 1.0
    """Share of the prompts, relative to the other environments' weights; 0: none."""

    @model_validator(mode="before")
    @classmethod
    def _name_defaults_to_type(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # pyright: ignore[reportUnknownVariableType]
        given: dict[str, Any] = dict(data)  # pyright: ignore[reportUnknownArgumentType]
        return given if given.get("name") or not given.get("type") else {**given, "name": str(given["type"])}


class AlgorithmChoice(Choice):
    """The learning algorithm. Invariant: further keys are the algorithm's own options."""

    name: str = "grpo"
    """A registered algorithm."""
    group_size: PositiveInt = 8
    """Samples per prompt."""


class EngineChoice(Choice):
    """The inference engine. Invariant: further keys are the engine's own options, the same for all replicas."""

    name: str = "transformers"
    """A registered engine."""
    replicas: Processes = 1
    """Engines that generate at the same time, each with a copy of the model, when the run starts."""
    min: Processes = 1
    """Fewest engines with which the run goes on while others cannot be started."""
    max: Processes = 1024
    """Most engines that `areal workers add` may bring the run to."""
    python: str = ""
    """Interpreter of the environment in which the engine's library is installed; empty: this one."""


class BackendChoice(Choice):
    """The training backend. Invariant: further keys are the backend's own options."""

    name: str = "torch"
    """A registered training backend."""


class ReshardChoice(Choice):
    """The way of the weights to the engines. Invariant: further keys are the resharder's own options."""

    name: str = AUTO
    """A registered resharder; auto: the best one that trainer and engines both offer."""
    overlap: bool = True
    """The trainer goes on while its weights are being sent, from a copy in the engines' dtype where the road needs
    one."""


class ClusterChoice(Choice):
    """Where workers run. Invariant: further keys are the cluster's own options."""

    name: str = AUTO
    """A registered cluster, such as ray (worker processes) or inline (one process, deterministic)."""


class TrackerChoice(Choice):
    """A place for metrics. Invariant: further keys are the tracker's own options."""

    name: str
    """A registered tracker."""


class Staleness(Block):
    """Invariant: no sample older than `max` versions is trained, unless `on_excess` is allow."""

    max: NonNegativeInt = 2
    """Most versions between the weights that sampled a token and the weights that train on it; 0: synchronous."""
    on_excess: Literal["drop", "mask", "allow"] = "drop"
    """A sample that is older when it is consumed: drop it, mask its old tokens, or train on it all the same."""
    order: Literal["issued", "finished"] = "issued"
    """Groups are trained on in the order in which they were issued, so that slow ones count like quick ones, or as
    they finish, so that no step waits for a slow one (which may then be too old)."""


class Rollout(Block):
    """Invariant: every episode ends: with a reward, an error or a time-out."""

    workers: Processes = 1
    """Processes that play episodes when the run starts."""
    min: Processes = 1
    """Fewest of them with which the run goes on while others cannot be started."""
    max: Processes = 1024
    """Most of them that `areal workers add` may bring the run to."""
    episode_timeout_s: PositiveFloat = 120.0
    """Seconds after which an episode is a time-out."""
    max_failed_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of errors and time-outs among the last `failure_window` episodes above which the run is aborted."""
    failure_window: PositiveInt = 64
    """Episodes that the share is taken over; fewer never abort the run."""
    max_buffer_mb: PositiveInt = 4096
    """Memory of finished samples beyond which only the running step's prompts are issued."""


class Failures(Block):
    """What a run bears. Invariant: no failure is borne for ever: each ends in a replacement or in a report."""

    max_restarts: NonNegativeInt = 16
    """Workers of all kinds that may be lost within `window_s`; one more ends the run with a report."""
    window_s: PositiveFloat = 600.0
    """Seconds over which losses are counted."""
    backoff_s: PositiveFloat = 0.5
    """Pause before a worker is replaced whose predecessor died soon after its start; it doubles, up to a minute."""
    hang_timeout_s: PositiveFloat = 120.0
    """Seconds without a sign of life, or of an engine without a token for its requests, after which a worker is
    replaced."""
    quiet_time_s: NonNegativeFloat = 0.0
    """Seconds without any finished episode after which the run says who waits for whom; 0: twice
    `rollout.episode_timeout_s`."""
    on_stall: Literal["replace", "end"] = "replace"
    """Then replace those responsible, and end the run if that does not help; or end it at once."""


class Parity(Block):
    """Whether engines and trainer are the same policy. Invariant: 0 prompts switch the check at the start off."""

    prompts: NonNegativeInt = 8
    """Prompts on which logprobs are compared before the first step; above a bound the run is refused. 0: never."""
    every_steps: NonNegativeInt = 20
    """Training steps between further comparisons; above a bound they give a warning. 0: only the first."""
    max_mean: PositiveFloat = 0.05
    """Largest mean of the differences between the logprobs of trainer and engine (nats per token)."""
    max_kl: PositiveFloat = 0.02
    """Largest KL divergence between engine and trainer (nats per token)."""


class Evaluation(Block):
    """Invariant: evaluation samples are never trained on."""

    every_steps: NonNegativeInt = 0
    """Training steps between evaluations on the test split; 0: never."""
    num_prompts: PositiveInt = 64
    """Prompts of the test split per evaluation, over all environments."""


class Checkpoint(Block):
    """Invariant: the newest complete checkpoint is never deleted."""

    every_steps: NonNegativeInt = 50
    """Training steps between checkpoints; 0: only the first and the last."""
    keep: PositiveInt = 2
    """Complete checkpoints kept on disk."""


class Journal(Block):
    """What the run remembers. Invariant: that a sample was trained, and by which step, is never forgotten."""

    max_mb: NonNegativeInt = 4096
    """Size above which the samples of steps that no kept checkpoint could need again lose their tokens, oldest first;
    the record that they were trained stays; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A component that the recipe names. Invariant: `path` leads to its block in the recipe."""

    kind: str
    """Singular of the hook that offers it: engine, backend, resharder, environment, algorithm, tracker, ..."""
    path: tuple[str | int, ...]
    name: str
    options: Mapping[str, Any]
    """Its own keys, not validated yet."""


class RunConfig(Block):
    """A whole recipe. Invariant: `dump` of it loads again to an equal value."""

    name: str = ""
    """Name of the run and of its folder; empty: `model.name`, or the first environment's name."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Decides everything random: the order of prompts, sampling, a new model's weights."""
    runs_dir: str = "runs"
    """Folder in which each run makes its own folder."""
    device: str = AUTO
    """A registered accelerator, such as cpu, cuda or npu; auto: the best of this machine."""
    model: ModelSpec = Field(default_factory=ModelSpec)
    """The model that learns."""
    training: TrainingSpec = Field(default_factory=TrainingSpec)
    """The optimizer and its schedule."""
    sampling: Sampling = Field(default_factory=Sampling)
    """How tokens are sampled, in training and in evaluation."""
    resources: Resources = Field(default_factory=Resources)
    """Devices of the trainer and of the engines."""
    parallel: LayerParallel = Field(default_factory=LayerParallel)
    """How the layers of a mixture of experts are spread over the trainer's devices."""
    environments: Annotated[tuple[EnvironmentChoice, ...], Field(json_schema_extra={"minItems": 1})] = (
        EnvironmentChoice(type="reverse_digits"),
    )
    """The tasks, mixed by weight."""
    algorithm: AlgorithmChoice = Field(default_factory=AlgorithmChoice)
    """From rewards to a loss."""
    engine: EngineChoice = Field(default_factory=EngineChoice)
    """Where tokens are made."""
    backend: BackendChoice = Field(default_factory=BackendChoice)
    """Where the weights are trained."""
    reshard: ReshardChoice = Field(default_factory=ReshardChoice)
    """How new weights reach the engines."""
    cluster: ClusterChoice = Field(default_factory=ClusterChoice)
    """Where the workers run."""
    staleness: Staleness = Field(default_factory=Staleness)
    """How old a sample may be when it is trained on."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How episodes are played and when failing ones stop the run."""
    failures: Failures = Field(default_factory=Failures)
    """What happens when workers die, hang or stall."""
    parity: Parity = Field(default_factory=Parity)
    """Comparing engines and trainer: before the first step, and in every step's report."""
    evaluation: Evaluation = Field(default_factory=Evaluation)
    """Measuring on the test split while the run goes on."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Saving the state of the run."""
    journal: Journal = Field(default_factory=Journal)
    """The record of all that was issued, finished and trained."""
    trackers: tuple[
        Annotated[
            TrackerChoice,
            BeforeValidator(
                lambda value: {"name": value} if isinstance(value, str) else value,
                json_schema_input_type=str | TrackerChoice,
            ),
        ],
        ...,
    ] = (TrackerChoice(name="jsonl"), TrackerChoice(name="tensorboard"))
    """Where metrics go: names, or blocks with a name and the tracker's own options."""

    @property
    def trainer_devices(self) -> TrainerDevices:
        """What the trainer's ranks are spread over."""
        train = self.resources.train
        return TrainerDevices(
            world_size=train.total,
            per_node=train.total // train.num_nodes,
            parallel=train.parallel,
            layers=self.parallel,
        )

    def selected(self) -> Iterator[Selected]:
        """Yield every component that is named; ``auto`` names none."""
        if self.device != AUTO:
            yield Selected(kind="accelerator", path=("device",), name=self.device, options={})
        for kind, key, choice in (
            ("algorithm", "algorithm", self.algorithm),
            ("engine", "engine", self.engine),
            ("backend", "backend", self.backend),
            ("resharder", "reshard", self.reshard),
            ("cluster", "cluster", self.cluster),
        ):
            if choice.name != AUTO:
                yield Selected(kind=kind, path=(key,), name=choice.name, options=choice.options)
        for index, environment in enumerate(self.environments):
            yield Selected(
                kind="environment",
                path=("environments", index),
                name=environment.type,
                options=environment.options,
            )
        for index, tracker in enumerate(self.trackers):
            yield Selected(kind="tracker", path=("trackers", index), name=tracker.name, options=tracker.options)


@cache
def config_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe, for editors; do not change the value."""
    schema = RunConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "AReaL recipe"}
