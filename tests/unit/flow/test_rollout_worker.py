"""The rollout worker: every sample ends in one trajectory, and how it ended is never mixed up."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flow_samples import handle_of

from areal.contracts.component import Component
from areal.contracts.environment import Client, Split
from areal.contracts.messages import Completion, GenerateRequest, Outcome, Prompt, Sampling, Trajectory
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, WorkerDied, WorkerFailed
from areal.flow.rollout.worker import EnvironmentChoice, GroupRequest, Part, RolloutWorker, episode_seed
from areal.testing.models import character_tokenizer

TIMEOUT_S = 0.3
ACTS = [
    "ok",
    "raise",
    "refuse",
    "hang",
    "own timeout",
    "own cancel",
    "exit",
    "nothing",
    "nan",
    "none",
    "text",
    "swallow",
    "silent",
    "zero",
    "status",
]


class Playground:
    """Prompt i plays the i-th act; ``prompts`` carry a reference answer on even places."""

    def __init__(self, options: dict[str, Any], context: EnvironmentContext) -> None:
        self.context = context

    def prompts(self, split: Split) -> Sequence[Prompt]:
        acts = ACTS if split == "train" else ACTS[:2]
        return [
            Prompt(
                environment=self.context.name,
                index=index,
                messages=({"role": "user", "content": f"task {index}"},),
                answer="" if index % 2 else str(index),
                metadata={"act": act},
            )
            for index, act in enumerate(acts)
        ]

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        act = prompt.metadata["act"]
        if act == "silent":
            return Outcome.scored(1.0)
        reply = await client.chat(prompt.messages, max_new_tokens=0 if act == "zero" else None)
        if act in ("hang", "swallow"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if act == "hang":
                    raise
                raise ValueError("cleaning up failed too") from None
        return self.answer(act, reply.completion)

    def answer(self, act: str, completion: Completion) -> Outcome:
        match act:
            case "raise":
                return json.loads("{not json\nat all")
            case "refuse":
                raise ConfigError("the prompt is too long")
            case "own timeout":
                raise TimeoutError("the checker's server is slow")
            case "own cancel":
                raise asyncio.CancelledError
            case "exit":
                sys.exit(3)
            case "nothing":
                return None  # type: ignore[return-value]
            case "nan":
                return Outcome(status="ok", reward=float("nan"), metrics={"accuracy": 1.0})
            case "none":
                return Outcome(status="ok")
            case "status":
                return Outcome(status="great", reward=1.0)  # type: ignore[arg-type]
            case "text":
                return Outcome(status="ok", reward=1.0, metrics={"accuracy": "high"})  # type: ignore[dict-item]
        return Outcome.scored(completion.token_ids[0] / 10, accuracy=1)


class ScriptedEngine:
    """Answers with the request's seed, or raises what it is told to. Invariant: `asked` holds every request."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.failure: Exception | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        return Completion(
            uid=request.uid,
            prompt_ids=request.prompt_ids,
            token_ids=(3 + request.seed % 10, 2),
            logprobs=(-0.5, -0.25),
            versions=(7, 7),
            finish_reason="stop",
        )


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    character_tokenizer(96).save_pretrained(folder)
    return folder


def make_worker(folder: str, timeout_s: float = TIMEOUT_S) -> RolloutWorker:
    component = Component(name="playground", factory=f"{__name__}:Playground")
    choices = [EnvironmentChoice(name="play", component=component, options={})]
    return RolloutWorker(choices, folder, Sampling(max_new_tokens=5, temperature=0.8), 11, timeout_s)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def worker(tokenizer_folder: str, engine: ScriptedEngine) -> RolloutWorker:
    made = make_worker(tokenizer_folder)
    made.start()
    await made.use_engines({"engine-0": handle_of("engine-0", engine)})
    return made


def ask(act: str, samples: tuple[int, ...] = (0,), number: int = 5) -> GroupRequest:
    return GroupRequest(number=number, environment="play", prompt_index=ACTS.index(act), samples=samples)


async def parts_of(stream: AsyncIterator[Part]) -> tuple[Prompt, dict[int, Trajectory]]:
    async with asyncio.timeout(20):
        prompt, *trajectories = [part async for part in stream]
    assert isinstance(prompt, Prompt)
    by_sample = {part.sample: part for part in trajectories if isinstance(part, Trajectory)}
    assert len(by_sample) == len(trajectories), "every sample once"
    return prompt, by_sample


OUTCOMES = {
    "raise": ("error", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    "refuse": ("error", "the prompt is too long"),
    "hang": ("timeout", "the episode of play did not end within 0.3 s"),
    "swallow": ("timeout", "the episode of play did not end within 0.3 s"),
    "own timeout": ("error", "TimeoutError: the checker's server is slow"),
    "own cancel": ("error", "CancelledError: "),
    "exit": ("error", "SystemExit: 3"),
    "nothing": ("error", "episode() of play returned None, it must return an Outcome"),
    "nan": ("error", "the reward is nan"),
    "none": ("error", "the reward None is not a number"),
    "silent": ("error", "the episode of play sampled no tokens; use client.chat"),
    "zero": ("error", "chat() was asked for max_new_tokens 0; ask for at least 1"),
    "status": ("error", "episode() of play returned the status 'great', not one of ok, error, timeout"),
    "text": ("error", "ValueError: could not convert string to float: 'high'"),
}


@pytest.mark.parametrize("act", ACTS)
async def test_how_episodes_end(worker: RolloutWorker, act: str) -> None:
    prompt, trajectories = await parts_of(worker.run_group(ask(act, (0, 1))))
    assert prompt.metadata["act"] == act
    assert set(trajectories) == {0, 1}
    for trajectory in trajectories.values():
        tokens = (0, None) if act in ("silent", "zero") else (2, 7)
        assert (trajectory.group, trajectory.num_tokens, trajectory.min_version) == (5, *tokens), "tokens are kept"
        outcome = trajectory.outcome
        if act == "ok":
            assert outcome.status == "ok" and outcome.reward == trajectory.turns[0].token_ids[0] / 10
            assert outcome.metrics == {"accuracy": 1.0}
        else:
            assert (outcome.status, outcome.detail) == OUTCOMES[act]
            assert outcome.reward is None


async def test_trajectories_come_as_they_end(tokenizer_folder: str, engine: ScriptedEngine) -> None:
    worker = make_worker(tokenizer_folder, timeout_s=30)
    worker.start()
    release = asyncio.Event()

    class Slow(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            if request.uid == "5/0/0":
                await release.wait()
            return await super().generate(request)

    await worker.use_engines({"slow": handle_of("slow", Slow())})
    order = []
    async for part in worker.run_group(ask("ok", (0, 1, 2))):
        order.append("prompt" if isinstance(part, Prompt) else part.sample)
        if len(order) == 3:
            release.set()
    assert order == ["prompt", *sorted(order[1:3], key=str), 0] and set(order[1:3]) == {1, 2}


async def test_only_the_samples_asked_for_with_streams_of_their_own(
    worker: RolloutWorker, engine: ScriptedEngine
) -> None:
    _, both = await parts_of(worker.run_group(ask("ok", (1, 3))))
    first = {asked.uid: asked for asked in engine.asked}
    assert set(both) == {1, 3} and set(first) == {"5/1/0", "5/3/0"}
    assert first["5/1/0"].seed != first["5/3/0"].seed
    engine.asked.clear()
    _, again = await parts_of(worker.run_group(ask("ok", (3,))))
    assert engine.asked == [first["5/3/0"]], "the same request, the same random stream"
    assert again[3] == both[3]
    assert first["5/3/0"].sampling == Sampling(max_new_tokens=5, temperature=0.8)


async def test_evaluation_is_greedy(worker: RolloutWorker, engine: ScriptedEngine) -> None:
    request = replace(ask("ok", number=-1), split="test", greedy=True)
    _, trajectories = await parts_of(worker.run_group(request))
    assert trajectories[0].group == -1
    assert engine.asked[0].sampling == Sampling(max_new_tokens=5, temperature=0.0)


async def test_a_probe_samples_as_training_does_before_all_others(
    worker: RolloutWorker, engine: ScriptedEngine
) -> None:
    completions = await worker.probe([("play", 0), ("play", 3)], 3)
    assert [request.sampling for request in engine.asked] == [Sampling(max_new_tokens=3, temperature=0.8)] * 2
    assert all(request.urgent for request in engine.asked)
    assert [completion.uid for completion in completions] == ["probe/0", "probe/1"]
    assert completions[0].prompt_ids != completions[1].prompt_ids
    await worker.probe([("play", 0)], 1000)
    assert engine.asked[-1].sampling.max_new_tokens == 5, "no longer than in training"


async def test_what_cannot_be_probed(worker: RolloutWorker, engine: ScriptedEngine) -> None:
    engine.failure = ConfigError("the prompt is too long")
    assert await worker.probe([("play", 0)], 3) == [], "it will be an episode's error"
    engine.failure = WorkerFailed("engine-0 did not answer")
    with pytest.raises(WorkerFailed, match="engine-0 did not answer"):
        await worker.probe([("play", 0)], 3)


def test_seeds_differ_by_run_group_and_sample() -> None:
    places = [(run, group, sample) for run in range(3) for group in range(-40, 40) for sample in range(8)]
    seeds = {episode_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**62 for seed in seeds)


async def test_no_engine_is_not_the_episodes_fault(worker: RolloutWorker, engine: ScriptedEngine) -> None:
    engine.failure = WorkerFailed("engine-0 did not answer")
    with pytest.raises(WorkerFailed, match="engine-0 did not answer"):
        await parts_of(worker.run_group(ask("ok", (0, 1))))
    engine.failure = WorkerDied("engine-0 died")
    _, trajectories = await parts_of(worker.run_group(ask("ok")))
    assert trajectories[0].outcome.status == "timeout", "the wait for another engine ends by the episode's deadline"
    assert trajectories[0].turns == ()


async def test_an_abandoned_group_stops(tokenizer_folder: str, engine: ScriptedEngine) -> None:
    worker = make_worker(tokenizer_folder, timeout_s=30)
    worker.start()
    await worker.use_engines({"engine-0": handle_of("engine-0", engine)})
    stream = worker.run_group(ask("hang", (0, 1)))
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    episodes = [task for task in asyncio.all_tasks() if "_episode" in repr(task)]
    assert len(engine.asked) == len(episodes) == 2
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait(episodes, timeout=5)
    assert all(task.cancelled() for task in episodes)


def test_start_counts_prompts_and_demonstrations(tokenizer_folder: str) -> None:
    worker = make_worker(tokenizer_folder)
    assert worker.start() == {"play": {"train": len(ACTS), "test": 2}}
    (pair,) = worker.demonstrations([("play", 1), ("play", 2)])
    tokenizer = character_tokenizer(96)
    assert pair == (tuple(tokenizer.encode("task 2")), (*tokenizer.encode("2"), tokenizer.eos_token_id))


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    worker = make_worker(str(tmp_path))
    with pytest.raises(WorkerFailed, match=r"no tokenizer could be loaded from .*'model.path' must be a Hugging Face"):
        worker.start()


class NoPrompts:
    """An environment that has something else than prompts."""

    def __init__(self, options: Any, context: EnvironmentContext) -> None:
        self.found = options

    def prompts(self, split: Split) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        raise AssertionError


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (iter(()), r"prompts\('train'\) of environment 'odd' returned <tuple_iterator .*it must return a sequence of"),
        (None, r"prompts\('train'\) of environment 'odd' returned None, it must return a sequence of Prompt"),
        (FileNotFoundError("data.txt"), r"prompts\('train'\) of environment 'odd' failed: FileNotFoundError: data.txt"),
    ],
)
def test_an_environment_without_prompts_is_named(tokenizer_folder: str, found: Any, said: str) -> None:
    component = Component(name="odd", factory=f"{__name__}:NoPrompts")
    choice = EnvironmentChoice(name="odd", component=component, options=found)
    with pytest.raises(WorkerFailed, match=said):
        RolloutWorker([choice], tokenizer_folder, Sampling(), 1, 1.0).start()


async def test_what_is_no_prompt_fails_its_group(tokenizer_folder: str) -> None:
    component = Component(name="odd", factory=f"{__name__}:NoPrompts")
    choice = EnvironmentChoice(name="odd", component=component, options=["a", "b"])
    worker = RolloutWorker([choice], tokenizer_folder, Sampling(), 1, 1.0)
    worker.start()
    request = GroupRequest(number=0, environment="odd", prompt_index=1, samples=(0,))
    with pytest.raises(WorkerFailed, match=r"prompts\('train'\) of environment 'odd' holds 'b', it must hold Prompt"):
        await parts_of(worker.run_group(request))
