"""The rollout worker: runs the episodes of a group, all at once, and yields each trajectory as it ends."""

from __future__ import annotations

import asyncio
import math
import random
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from areal.contracts.cluster import Handle
from areal.contracts.component import Component
from areal.contracts.environment import Environment, Split
from areal.contracts.messages import Completion, GenerateRequest, Outcome, Prompt, Sampling, Status, Trajectory
from areal.contracts.specs import EnvironmentContext
from areal.errors import ArealError, WorkerFailed, first_line
from areal.flow.rollout.client import ChatCodec, EpisodeClient
from areal.flow.rollout.engines import EnginePool

FAILURES_SHOWN = 5
"""Tracebacks of episodes in a worker's log; the rest would be the same ones over and over."""

Part = Prompt | Trajectory
"""What `RolloutWorker.run_group` yields: the prompt first, then trajectories in the order in which they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChoice:
    """An entry of the recipe's ``environments``. Invariant: `options` were validated by the component."""

    name: str
    component: Component
    options: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Work for a rollout worker. Invariant: the same request gives the same prompt and the same random streams."""

    number: int
    """The group's number; evaluation uses negative ones."""
    environment: str
    prompt_index: int
    samples: tuple[int, ...]
    """Which samples to make; a resumed group asks only for the missing ones."""
    split: Split = "train"
    greedy: bool = False
    attempt: int = 0
    """How often the group was handed out before; engines may still have what an earlier attempt asked for."""


class RolloutWorker:
    """Invariant: every sample of an accepted group ends in one trajectory whose outcome is ok, error or timeout.

    What is not the episode's fault (no engine left) fails the group instead, and the controller issues it again.
    """

    def __init__(
        self,
        choices: Sequence[EnvironmentChoice],
        model_path: str,
        sampling: Sampling,
        seed: int,
        episode_timeout_s: float,
    ) -> None:
        self._choices = choices
        self._model_path = model_path
        self._sampling = sampling
        self._seed = seed
        self._timeout_s = episode_timeout_s
        self._environments: dict[str, Environment] = {}
        self._prompts: dict[tuple[str, Split], Sequence[Prompt]] = {}
        self._engines = EnginePool()
        self._failures_to_show = FAILURES_SHOWN

    def start(self) -> dict[str, dict[str, int]]:
        """Make the environments; return the number of prompts by environment and split."""
        from transformers import AutoTokenizer

        try:
            tokenizer = cast(Any, AutoTokenizer).from_pretrained(self._model_path)
        except (OSError, ValueError) as error:
            raise WorkerFailed(
                f"no tokenizer could be loaded from {self._model_path!r} ({first_line(error)}); "
                "'model.path' must be a Hugging Face model folder or hub id"
            ) from error
        self._codec = ChatCodec(tokenizer)
        for choice in self._choices:
            context = EnvironmentContext(name=choice.name, seed=self._seed)
            environment: Environment = choice.component.load()(choice.options, context)
            self._environments[choice.name] = environment
            for split in ("train", "test"):
                self._prompts[choice.name, split] = _prompts_of(environment, choice.name, split)
        return {
            choice.name: {split: len(self._prompts[choice.name, split]) for split in ("train", "test")}
            for choice in self._choices
        }

    async def use_engines(self, handles: Mapping[str, Handle]) -> None:
        self._engines.replace(handles)

    async def run_group(self, request: GroupRequest) -> AsyncIterator[Part]:
        found = self._prompts[request.environment, request.split][request.prompt_index]
        prompt = _is_prompt(found, request.environment, request.split)
        yield prompt
        tasks = [asyncio.create_task(self._episode(request, prompt, sample)) for sample in request.samples]
        try:
            for next_done in asyncio.as_completed(tasks):
                yield await next_done
        finally:
            for task in tasks:
                task.cancel()

    async def _episode(self, request: GroupRequest, prompt: Prompt, sample: int) -> Trajectory:
        sampling = replace(self._sampling, temperature=0.0) if request.greedy else self._sampling
        uid = f"{request.number}/{sample}"
        seed = episode_seed(self._seed, request.number, sample)
        # Evaluations use the same numbers again and again, under other weights.
        again = request.attempt > 0 and request.split == "train"
        generate = self._engines.recall if again else self._engines.generate
        client = EpisodeClient(generate, self._codec, sampling, uid, seed)
        outcome = await self._play(self._environments[request.environment], prompt, client)
        if outcome.status == "ok" and not any(turn.token_ids for turn in client.turns):
            outcome = Outcome.error(f"the episode of {request.environment} sampled no tokens; use client.chat")
        return Trajectory(group=request.number, sample=sample, turns=tuple(client.turns), outcome=outcome)

    async def _play(self, environment: Environment, prompt: Prompt, client: EpisodeClient) -> Outcome:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return _checked(await environment.episode(prompt, client), prompt.environment)
        except WorkerFailed:
            raise
        except ArealError as error:
            return Outcome.error(str(error))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            self._log_failure(error)
            if deadline.expired():
                return Outcome.timeout(f"the episode of {prompt.environment} did not end within {self._timeout_s:g} s")
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            return Outcome.error(f"{type(error).__name__}: {first_line(error)}")

    def _log_failure(self, error: BaseException) -> None:
        """Show whoever wrote the environment where it failed; the outcome has one line only."""
        if self._failures_to_show and not isinstance(error, (TimeoutError, asyncio.CancelledError)):
            self._failures_to_show -= 1
            traceback.print_exception(error)

    async def probe(self, draws: Sequence[tuple[str, int]], max_new_tokens: int) -> list[Completion]:
        """Return a short completion of each training prompt, as the engines sample in training.

        A prompt that cannot be completed is left out: it will be an episode's error.
        """
        sampling = replace(self._sampling, max_new_tokens=min(max_new_tokens, self._sampling.max_new_tokens))
        requests = [
            GenerateRequest(
                uid=f"probe/{number}",
                prompt_ids=self._codec.encode(_is_prompt(self._prompts[name, "train"][index], name, "train").messages),
                sampling=sampling,
                seed=number,
                urgent=True,
            )
            for number, (name, index) in enumerate(draws)
        ]
        made = await asyncio.gather(*map(self._engines.generate, requests), return_exceptions=True)
        for error in made:
            if isinstance(error, BaseException) and (
                isinstance(error, WorkerFailed) or not isinstance(error, ArealError)
            ):
                raise error
        return [completion for completion in made if isinstance(completion, Completion)]

    def demonstrations(self, draws: Sequence[tuple[str, int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return (prompt ids, answer ids) of training prompts that carry a reference answer."""
        prompts = [self._prompts[name, "train"][index] for name, index in draws]
        return [self._codec.demonstrate(prompt.messages, prompt.answer) for prompt in prompts if prompt.answer]


def episode_seed(run_seed: int, group: int, sample: int) -> int:
    """Return the seed of one sample's random streams; evaluation's negative group numbers are streams of their own."""
    return random.Random(f"{run_seed}/{group}/{sample}").getrandbits(62)


def _checked(outcome: Any, environment: str) -> Outcome:
    """Return an outcome of anybody's making as one that keeps the promises of `Outcome`."""
    if not isinstance(outcome, Outcome):
        return Outcome.error(f"episode() of {environment} returned {outcome!r:.80}, it must return an Outcome")
    if outcome.status not in get_args(Status):
        known = ", ".join(get_args(Status))
        return Outcome.error(f"episode() of {environment} returned the status {outcome.status!r}, not one of {known}")
    metrics = {name: number for name, value in outcome.metrics.items() if math.isfinite(number := float(value))}
    scored = Outcome.scored(cast(float, outcome.reward)) if outcome.status == "ok" else replace(outcome, reward=None)
    return replace(scored, metrics=metrics)


def _prompts_of(environment: Environment, name: str, split: Split) -> Sequence[Prompt]:
    """Return a split's prompts; WorkerFailed names the environment that has none or something else."""
    try:
        prompts = environment.prompts(split)
    except ArealError:
        raise
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {first_line(error)}"
        raise WorkerFailed(f"prompts({split!r}) of environment {name!r} failed: {said}") from error
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise WorkerFailed(
            f"prompts({split!r}) of environment {name!r} returned {prompts!r:.80}, it must return a sequence of Prompt"
        )
    return prompts


def _is_prompt(found: object, name: str, split: Split) -> Prompt:
    """Return what an environment gave as a prompt; WorkerFailed when it is something else."""
    if isinstance(found, Prompt):
        return found
    raise WorkerFailed(f"prompts({split!r}) of environment {name!r} holds {found!r:.80}, it must hold Prompt objects")


def _is_cancelled() -> bool:
    """Return whether somebody cancelled this task, rather than a library's own CancelledError coming by."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
