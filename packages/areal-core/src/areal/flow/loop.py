"""The circle, and the only file that knows all stages.

    prompts ──► rollout ──► buffer ──► trainer ──► weights ──► engine
       ▲           │                                             │
       │           └───────────── generate ──────────────────────┘
       └── slots, freed by each published version

issue_forever    Pacing.take ─► Mixture.next ─► ReplayBuffer.expect ─► Crew.run ─► ReplayBuffer.put ─► journal
train_forever    ReplayBuffer.take ─► TrainerWorker.train ─► Publisher.stage ─► Staged.commit (beside the next step)
watch_forever    Cluster.watch ─► Fleet.lost / Crew.lost ─► replacement
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from areal.contracts.cluster import Cluster, Handle
from areal.contracts.messages import Group, Prompt, StepReport, Version
from areal.errors import ParityError, TransferFailed, WorkerFailed
from areal.flow.buffer.buffer import OnExcess, ReplayBuffer, staleness
from areal.flow.buffer.journal import Issued, Journal
from areal.flow.engine.fleet import Fleet
from areal.flow.prompts.mixture import Mixture
from areal.flow.prompts.pacing import Pacing
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.evaluate import evaluate, some_prompts
from areal.flow.rollout.worker import GroupRequest
from areal.flow.tasks import TaskSet
from areal.flow.trainer.metrics import summarise
from areal.flow.trainer.parity import Bounds
from areal.flow.trainer.worker import TrainRequest
from areal.flow.weights.publisher import Publisher, Staged, Target

PUBLISH_ATTEMPTS = 5
PUBLISH_PAUSE_S = 1.0
"""A cluster notices a death within about two seconds."""
PARITY_TOKENS = 32
"""Tokens of each completion on which engines and trainer are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Invariant: with the same settings and seed an inline run is the same run, bit for bit."""

    batch_size: int
    """Groups per training step."""
    group_size: int
    """Samples per group."""
    max_steps: int
    max_staleness: int
    on_excess: OnExcess
    step_timeout_s: float
    """Longest time for one training step."""
    quiet_time_s: float
    """Longest wait for a batch without anything arriving before the run ends and says who it waited for."""
    evaluate_every: int
    """Steps between evaluations; 0: never."""
    evaluation_prompts: int
    checkpoint_every: int
    """Steps between checkpoints; 0: only the last."""
    parity_prompts: int
    """Prompts on which engines and trainer are compared; 0: never."""
    parity_every: int
    """Steps between comparisons; 0: only before the first step."""
    parity_bounds: Bounds


class Observer(Protocol):
    """Whoever watches the run. Invariant: no call waits."""

    def step_finished(self, report: StepReport) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def weights_published(self, version: Version) -> None: ...

    def alarmed(self, step: int, sentence: str) -> None: ...

    def replaced(self, name: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the loop connects. Invariant: each stage knows none of the others."""

    cluster: Cluster
    trainer: Handle
    fleet: Fleet
    crew: Crew
    mixture: Mixture
    pacing: Pacing
    buffer: ReplayBuffer
    journal: Journal
    publisher: Publisher
    budget: FailureBudget


class Loop:
    """Invariant: at any moment every issued group is running, in the buffer, or journalled as consumed."""

    def __init__(
        self,
        settings: LoopSettings,
        stages: Stages,
        checkpoint: Callable[[int], Awaitable[object]],
        observer: Observer,
        first_step: int,
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._checkpoint = checkpoint
        self._observer = observer
        self._step = first_step
        self._tasks: TaskSet
        self._committing: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._extra: dict[str, float] = {}
        self._parity: dict[str, float] = {}
        self._stopping = False

    def stop(self) -> None:
        """Finish the step that runs, then end as after the last step."""
        self._stopping = True
        self._stages.buffer.wake()

    async def run(self, unfinished: Sequence[Issued] = ()) -> int:
        """Publish the trainer's weights, then go round until `max_steps` or `stop`; return the steps done.

        `unfinished`: groups of an earlier run whose missing samples are to be made first. Raises the first
        error of any of its coroutines.
        """
        self._tasks = TaskSet()
        self._tasks.start(self._watch_forever())
        await self._tasks.run(self._train_forever(unfinished))
        return self._step

    # prompts -> rollout -> buffer

    async def _issue_forever(self) -> None:
        """Hand out prompts. Waits for a slot, freed by a published version or a dropped group."""
        stages = self._stages
        while True:
            first = stages.pacing.num_issued
            num_groups = await stages.pacing.take()
            groups = [self._next_group(first + offset) for offset in range(num_groups)]
            stages.buffer.expect(groups)
            for issued in groups:
                self._tasks.start(self._roll(issued))

    def _next_group(self, number: int) -> Issued:
        environment, index = self._stages.mixture.next()
        return Issued(
            number=number,
            environment=environment,
            prompt_index=index,
            num_samples=self._settings.group_size,
            issued_version=self._stages.pacing.served,
        )

    async def _roll(self, issued: Issued) -> None:
        """Have one group's missing samples made. Waits for a rollout worker, which waits for engines.

        A group of an earlier run waits for its turn first, brought by a published version.
        """
        await self._stages.pacing.turn_of(issued.number)
        buffer = self._stages.buffer
        request = GroupRequest(
            number=issued.number, environment=issued.environment, prompt_index=issued.prompt_index, samples=()
        )
        async for part in self._stages.crew.run(request, lambda: buffer.missing(issued.number)):
            if not isinstance(part, Prompt):
                self._stages.budget.count(part.outcome)
            buffer.put(issued.number, part)

    # buffer -> trainer -> weights

    async def _train_forever(self, unfinished: Sequence[Issued]) -> None:
        """Train, publish, report. Waits for a full batch, filled by `_roll`."""
        await self._publish()
        await self._committed()
        measured_at = self._step
        if broken := await self._measure_parity():
            if self._step == 0:
                raise ParityError(f"{broken}; to go on all the same, raise parity.max_mean and parity.max_kl")
            self._observer.alarmed(self._step, broken)
        for issued in unfinished:
            self._tasks.start(self._roll(issued))
        issuing = self._tasks.start(self._issue_forever())
        while self._step < self._settings.max_steps and not self._stopping:
            waited_from = time.perf_counter()
            if self._settings.parity_every and self._step >= measured_at + self._settings.parity_every:
                measured_at = self._step
                if broken := await self._measure_parity():
                    self._observer.alarmed(self._step, broken)
            groups = await self._next_batch()
            if groups is None:
                break
            await self._train(groups, time.perf_counter() - waited_from)
        issuing.cancel()
        await self._committed()
        if self._evaluating is not None:
            await self._evaluating
        await self._checkpoint(self._step)

    async def _measure_parity(self) -> str:
        """Compare engines and trainer on a few prompts; return what is wrong with them, or an empty string.

        Waits until both have the same weights, and for a short answer to each prompt, which comes before all else.
        """
        settings, stages = self._settings, self._stages
        draws = some_prompts(stages.crew.num_prompts, "train", settings.parity_prompts)
        if not draws:
            return ""
        await self._committed()
        probing = self._tasks.start(stages.crew.probe(draws, PARITY_TOKENS, settings.quiet_time_s))
        while not (await asyncio.wait([probing], timeout=PUBLISH_PAUSE_S))[0]:
            if stages.fleet.joining:  # the engine that was asked died; its successor waits for these weights
                await self._publish()
                await self._committed()
        self._parity = await stages.trainer.call("parity", probing.result(), deadline_s=settings.step_timeout_s)
        return settings.parity_bounds.broken_by(self._parity)

    async def _next_batch(self) -> list[Group] | None:
        """Return the oldest full batch, or None when the run is to stop."""
        stages, step = self._stages, self._step + 1
        while not self._stopping:
            dropped = stages.buffer.num_dropped
            groups = stages.buffer.take(self._settings.batch_size, self._step, step)
            stages.pacing.drop(stages.buffer.num_dropped - dropped)
            if groups is not None:
                return groups
            if stages.fleet.joining:
                await self._committed()
                if stages.fleet.joining:  # that publish was made without it
                    await self._publish()
            try:
                async with asyncio.timeout(self._settings.quiet_time_s):
                    await stages.buffer.changed()
            except TimeoutError:
                raise WorkerFailed(self._why_quiet()) from None
        return None

    def _why_quiet(self) -> str:
        stages = self._stages
        return (
            f"the trainer waited {self._settings.quiet_time_s:g} s for {self._settings.batch_size} groups and nothing "
            f"arrived: {stages.buffer.num_ready} are ready, {stages.buffer.num_gathering} are being made by "
            f"{len(stages.fleet.members)} engines, {stages.pacing.num_free} more may be issued; the workers' logs "
            "in the run's folder say what they were doing"
        )

    async def _train(self, groups: list[Group], waited_s: float) -> None:
        began = time.perf_counter()
        self._tasks.start(self._stages.fleet.measure_load())
        settings, version = self._settings, self._step
        oldest = version - settings.max_staleness if settings.on_excess == "mask" else None
        request = TrainRequest(step=version + 1, version=version, groups=tuple(groups), oldest_version=oldest)
        trained: dict[str, float] = await self._stages.trainer.call(
            "train", request, deadline_s=settings.step_timeout_s
        )
        self._step += 1
        await self._committed()
        await self._publish()
        seconds = time.perf_counter() - began + waited_s
        report = StepReport(
            step=self._step,
            version=self._step,
            groups=tuple(group.number for group in groups),
            metrics={
                **self._metrics(groups, version),
                **trained,
                "time/wait_s": waited_s,
                "time/step_s": seconds,
                "rollout/tokens_per_s": sum(t.num_tokens for g in groups for t in g.trajectories) / seconds,
            },
        )
        self._stages.journal.stepped(report)
        self._observer.step_finished(report)
        if settings.evaluate_every and self._step % settings.evaluate_every == 0:
            self._evaluate()
        if settings.checkpoint_every and self._step % settings.checkpoint_every == 0:
            await self._checkpoint(self._step)

    def _metrics(self, groups: list[Group], version: Version) -> dict[str, float]:
        stages = self._stages
        ages = [staleness(group, version) for group in groups]
        extra, self._extra = self._extra, {}
        summary = dict(summarise(groups))
        if passed_over := stages.buffer.collect_passed_over():
            # The policy's reward is that of all it answered, not of what was chosen to train on.
            everything = summarise([*groups, *passed_over])
            summary |= {name: value for name, value in everything.items() if name.startswith(("reward/", "task/"))}
        return {
            **summary,
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": float(max(ages)),
            "staleness/dropped_groups": float(stages.buffer.num_stale_dropped),
            "rollout/passed_over_groups": float(stages.buffer.num_passed_over),
            "buffer/ready_groups": float(stages.buffer.num_ready),
            "buffer/running_groups": float(stages.buffer.num_gathering),
            "rollout/reissued_groups": float(stages.crew.num_reissued),
            **extra,
            **self._parity,
            **stages.fleet.load,
        }

    async def _publish(self) -> None:
        """Send the trainer's weights to all engines; committing them runs beside the next step."""
        staged = await self._stage(PUBLISH_ATTEMPTS)
        self._committing = self._tasks.start(self._commit(staged, self._step))

    async def _stage(self, attempts: int) -> Staged | None:
        targets = [
            Target(name=name, handle=member.handle, layout=member.layout)
            for name, member in self._stages.fleet.members.items()
        ]
        if not targets:
            return None
        try:
            return await self._stages.publisher.stage(self._step, targets)
        except TransferFailed:
            if attempts == 1:
                raise
            # An engine that died on the way breaks the sender too; the watcher takes it out meanwhile.
            await asyncio.sleep(PUBLISH_PAUSE_S)
            return await self._stage(attempts - 1)

    async def _commit(self, staged: Staged | None, version: Version) -> None:
        stages = self._stages
        if staged is not None:
            published = await staged.commit()
            self._extra |= published.metrics
            for name, reason in published.failed.items():
                await self._lost_engine(name, reason)
            await stages.fleet.committed(list(published.committed))
        stages.journal.published(version)
        stages.pacing.publish(version)
        self._observer.weights_published(version)

    async def _committed(self) -> None:
        """Wait until the last publish is committed; its own deadlines end it."""
        if self._committing is not None:
            await self._committing

    # beside the circle

    def _evaluate(self) -> None:
        """Start an evaluation of the weights being published, unless an earlier one still runs."""
        if self._evaluating is None or self._evaluating.done():
            self._evaluating = self._tasks.start(self._evaluated(self._step))

    async def _evaluated(self, step: int) -> None:
        await self._committed()  # the engines may still be reading this step's weights
        prompts = some_prompts(self._stages.crew.num_prompts, "test", self._settings.evaluation_prompts)
        groups = await evaluate(self._stages.crew, prompts)
        metrics = {f"eval/{name}": value for name, value in summarise(groups).items()}
        self._stages.journal.evaluated(step, metrics)
        self._observer.evaluated(step, metrics)

    async def _watch_forever(self) -> None:
        """Replace workers that die. Waits for deaths, which the cluster reports."""
        async for death in self._stages.cluster.watch():
            if death.name in self._stages.fleet.members:
                await self._lost_engine(death.name, death.reason)
            elif death.name.startswith("engine"):
                continue  # it died while it started: whoever started it has the error
            elif death.name.startswith("rollout"):
                await self._stages.crew.lost(death.name, death.reason)
                self._observer.replaced(death.name, death.reason)
                self._tasks.start(self._stages.crew.add())
            else:
                raise WorkerFailed(f"{death.name} died: {death.reason}")

    async def _lost_engine(self, name: str, reason: str) -> None:
        """Take an engine out and start another; whoever hears of it second, publisher or watcher, changes nothing."""
        stages = self._stages

        async def replace() -> None:
            await stages.fleet.add()
            stages.buffer.wake()  # the trainer may be waiting for samples that only this engine can make

        if await stages.fleet.lost(name, reason):
            self._observer.replaced(name, reason)
            self._tasks.start(replace())
