"""What travels between the stages: frozen, keyword-only, plain Python values that pickle and print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from areal.contracts.options import STRICT

FinishReason = Literal["stop", "length", "interrupted"]
Status = Literal["ok", "error", "timeout"]
Version = int
"""A policy version: 0 is the model before the first training step, each publish adds one."""

_Message = TypeVar("_Message")


def _pickled_fast(message: type[_Message]) -> type[_Message]:
    """Give a frozen dataclass with slots a quick way into and out of pickles.

    The one that dataclasses writes looks the fields up for every object; a small model's rollout moves thousands of
    messages a second, and that lookup costs more than the rest of their way.
    """
    names = [part.name for part in fields(message)]  # pyright: ignore[reportArgumentType]
    put = [getattr(message, name).__set__ for name in names]  # a frozen object cannot be set otherwise
    take = attrgetter(*names)

    def getstate(self: Any) -> Any:
        if type(self) is message:
            return take(self)
        return {part.name: getattr(self, part.name) for part in fields(self)}  # a subclass may have more

    def setstate(self: Any, state: Any) -> None:
        if isinstance(state, dict):
            for name, value in state.items():  # pyright: ignore[reportUnknownVariableType]
                object.__setattr__(self, name, value)  # pyright: ignore[reportUnknownArgumentType]
            return
        for place, value in zip(put, state, strict=True):
            place(self, value)

    message.__getstate__ = getstate  # pyright: ignore
    message.__setstate__ = setstate  # pyright: ignore
    return message


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Invariant: `environment` and `index` name the same task in every run with the same data."""

    environment: str
    """Name of the entry in the recipe's ``environments`` list."""
    index: int
    """Position in that environment's split."""
    messages: tuple[Mapping[str, str], ...]
    """Chat messages (``role``, ``content``); a tokenizer without chat template joins the contents."""
    answer: str = ""
    """The reference answer, if there is one; supervised warm-up learns from it."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever the environment's scorer needs; JSON values only."""


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Invariant: logprobs under this sampling are of the whole vocabulary at `temperature`, before top-k and top-p."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    max_new_tokens: PositiveInt = 128
    """Most tokens sampled per reply."""
    temperature: NonNegativeFloat = 1.0
    """Above 0; 0 is greedy, and then logprobs are of the unscaled logits."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: NonNegativeInt = 0
    """Most probable tokens kept; 0 keeps all."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Generation ends after one of these, which is kept as the last token."""


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Invariant: the tokens depend on the weights, `prompt_ids`, `sampling` and `seed`, not on the neighbours."""

    uid: str
    prompt_ids: tuple[int, ...]
    """[P] token ids, at least one."""
    sampling: Sampling
    seed: int
    """Seeds this request's own random stream."""
    urgent: bool = False
    """Somebody waits for it: an engine that can lets it pass those that have not begun."""


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Invariant: `token_ids`, `logprobs` and `versions` have the same length T, whatever the finish reason."""

    uid: str
    prompt_ids: tuple[int, ...]
    """[P] the ids that were really fed to the model."""
    token_ids: tuple[int, ...]
    """[T] sampled ids, the stop token included."""
    logprobs: tuple[float, ...]
    """[T] natural log of the probability of each sampled token; convention in `Sampling`."""
    versions: tuple[Version, ...]
    """[T] the weights that produced each token."""
    finish_reason: FinishReason
    """``stop``: a stop token; ``length``: the limit; ``interrupted``: aborted, the tokens so far are valid."""


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Invariant: only `status` ok carries a reward, and that reward is finite; failures are never a silent 0."""

    status: Status
    reward: float | None = None
    detail: str = ""
    """Why it failed, one line."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers the environment reports, averaged per step (for example ``accuracy``)."""

    @classmethod
    def scored(cls, reward: float, **metrics: float) -> Outcome:
        """Return an ok outcome, or an error when the reward is NaN, infinite or not a number."""
        try:
            value = float(reward)
        except (TypeError, ValueError):
            return cls.error(f"the reward {reward!r} is not a number")
        if not math.isfinite(value):
            return cls.error(f"the reward is {value}")
        return cls(status="ok", reward=value, metrics=metrics)

    @classmethod
    def error(cls, detail: str) -> Outcome:
        return cls(status="error", detail=detail)

    @classmethod
    def timeout(cls, detail: str) -> Outcome:
        return cls(status="timeout", detail=detail)


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Invariant: `turns` holds exactly the tokens the engine produced; nothing is ever re-tokenised."""

    group: int
    """The group's number in the run's order of prompts."""
    sample: int
    """Which of the group's samples, from 0."""
    turns: tuple[Completion, ...]
    outcome: Outcome

    @property
    def uid(self) -> str:
        return f"{self.group}/{self.sample}"

    @property
    def num_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def min_version(self) -> Version | None:
        """The oldest weights among the sampled tokens, or None when there are no tokens."""
        return min((min(turn.versions) for turn in self.turns if turn.versions), default=None)


@_pickled_fast
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Invariant: all trajectories answer the same prompt, and sample numbers are unique."""

    number: int
    """Position in the run's order of prompts; the journal's key."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence. Invariant: all per-token fields have length T; loss_mask[0] is False."""

    token_ids: tuple[int, ...]
    """[T] prompt and sampled ids."""
    loss_mask: tuple[bool, ...]
    """[T] True where the token was sampled and is trained."""
    logprobs: tuple[float, ...]
    """[T] behaviour logprobs from the engine; 0 where the mask is False."""
    versions: tuple[Version, ...]
    """[T] behaviour versions; -1 where the mask is False."""
    advantages: tuple[float, ...]
    """[T] advantage of each token; 0 where the mask is False."""
    proximal_logprobs: tuple[float, ...] | None = None
    """[T] logprobs of the policy before this step's first update; None: take the current ones, detached."""
    reference_logprobs: tuple[float, ...] | None = None
    """[T] logprobs of the reference policy; None: the algorithm asks for none."""
    values: tuple[float, ...] | None = None
    """[T] the critic's value of the state in which each token was sampled; None: there is no critic."""
    returns: tuple[float, ...] | None = None
    """[T] what the critic should have said; None: there is no critic."""
    group: int = -1
    """Number of the group; rows of one group answer the same prompt."""

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)

    def with_proximal(self, logprobs: tuple[float, ...]) -> Row:
        return replace(self, proximal_logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer update. Invariant: the loss does not depend on how `rows` are packed into micro-batches."""

    rows: tuple[Row, ...]
    """Rows to compute; rows that cannot give a gradient may have been left out."""
    num_tokens: int
    """Trained tokens of the whole batch, the left-out rows' included: the normaliser of token means."""
    num_sequences: int
    """Sequences of the whole batch, the left-out rows' included: the normaliser of sequence means."""
    temperature: float = 1.0
    """Sampling temperature; the backend divides logits by it so that logprobs match the engine's."""
    version: Version = 0
    """The weights before the training step that this update belongs to."""
    first_update: bool = True
    """No update of this step came before: the current policy is the proximal one."""
    whole_groups: bool = False
    """Rows of one group must be computed in one micro-batch, because the loss compares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step did. Invariant: every group it names is consumed by this step and by no other."""

    step: int
    """From 1."""
    version: Version
    """Weights after the step."""
    groups: tuple[int, ...]
    """Numbers of the groups it consumed."""
    metrics: Mapping[str, float]
    """Names with units: ``reward/mean``, ``staleness/max`` (versions), ``time/train_s``, ``tokens/s``, ..."""
