"""The circle, and the only file that knows all stages.

    prompts ──► rollout ──► buffer ──► trainer ──► weights ──► engine
       ▲           │                                             │
       │           └───────────── generate ──────────────────────┘
       └── slots, freed by each published version

issue_forever    Pacing.take ─► Mixture.next ─► ReplayBuffer.expect ─► Crew.run ─► ReplayBuffer.put ─► journal
train_forever    ReplayBuffer.take ─► TrainerWorker.train ─► Publishing.publish (committed beside the next step)
                 a lost trainer: another one ─► newest checkpoint ─► what it had not trained is ready again
Keeper           Cluster.watch, Handle.ping ─► Fleet.lost / Crew.lost ─► replacement
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from areal.contracts.messages import Group, Prompt, StepReport, Version
from areal.errors import ParityError, TrainerLost, WorkerFailed
from areal.flow.buffer.buffer import OnExcess, ReplayBuffer, staleness
from areal.flow.buffer.journal import Issued, Journal, Recovery
from areal.flow.comparing import Comparing
from areal.flow.engine.fleet import Fleet
from areal.flow.evaluator import Evaluator
from areal.flow.keeper import Keeper
from areal.flow.prompts.mixture import Mixture
from areal.flow.prompts.pacing import Pacing
from areal.flow.publishing import Publishing
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew
from areal.flow.rollout.worker import GroupRequest
from areal.flow.saving import Saving
from areal.flow.sharing import OwnDevices
from areal.flow.stall import Scene
from areal.flow.tasks import TaskSet
from areal.flow.trainer.metrics import summarise
from areal.flow.trainer.seat import TrainerSeat
from areal.flow.trainer.worker import TrainRequest
from areal.flow.vitals import Vitals


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
    """Longest wait for a batch without anything arriving before it is looked into."""
    on_stall: Literal["replace", "end"]
    """Replace whoever is responsible, once, or end the run at once."""
    max_buffer_bytes: int
    """Memory of finished samples beyond which only the running step's groups are issued."""
    evaluate_every: int
    """Steps between evaluations; 0: never."""
    checkpoint_every: int
    """Steps between checkpoints; 0: only the last."""


class Observer(Protocol):
    """Whoever watches the run. Invariant: no call waits."""

    def step_finished(self, report: StepReport) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def alarmed(self, step: int, sentence: str) -> None: ...

    def stalled(self, sentence: str, stacks: str) -> None: ...

    def went_back(self, step: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the loop connects. Invariant: each stage knows none of the others."""

    trainer: TrainerSeat
    keeper: Keeper
    evaluator: Evaluator
    fleet: Fleet
    crew: Crew
    mixture: Mixture
    pacing: Pacing
    buffer: ReplayBuffer
    journal: Journal
    publishing: Publishing
    comparing: Comparing
    saving: Saving
    sharing: OwnDevices
    budget: FailureBudget


class Loop:
    """Invariant: at any moment every issued group is running, in the buffer, or journalled as consumed."""

    def __init__(
        self,
        settings: LoopSettings,
        stages: Stages,
        restore: Callable[[], Awaitable[Recovery]],
        observer: Observer,
        first_step: int,
    ) -> None:
        """`restore`: puts another trainer into its seat with the newest checkpoint, and the journal back to it."""
        self._settings = settings
        self._stages = stages
        self._restore = restore
        self._observer = observer
        self._step = first_step
        stages.comparing.last_step = first_step
        self._tasks: TaskSet
        self._unfinished: Sequence[Issued] = ()
        self._issuing: asyncio.Task[None] | None = None
        self._rolling: dict[asyncio.Task[None], Issued] = {}
        self._vitals = Vitals()
        self._stalled_at: int | None = None
        """Samples that had arrived when workers were last replaced because nothing came."""
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
        self._unfinished = unfinished
        self._stages.keeper.start(self._tasks, self._stages.buffer.wake)
        self._tasks.start(self._vitals.measure_forever())
        await self._tasks.run(self._train_forever())
        return self._step

    # prompts -> rollout -> buffer

    async def _issue_forever(self) -> None:
        """Hand out prompts. Waits for a slot, freed by a published version or a dropped group."""
        stages = self._stages
        while True:
            first = stages.pacing.num_issued
            num_groups = await stages.pacing.take(lambda: stages.buffer.num_bytes > self._settings.max_buffer_bytes)
            groups = [self._next_group(first + offset) for offset in range(num_groups)]
            stages.buffer.expect(groups)
            for issued in groups:
                self._start(issued)

    def _next_group(self, number: int) -> Issued:
        environment, index = self._stages.mixture.next()
        return Issued(
            number=number,
            environment=environment,
            prompt_index=index,
            num_samples=self._settings.group_size,
            issued_version=self._stages.pacing.served,
        )

    def _start(self, issued: Issued) -> None:
        rolling = self._tasks.start(self._roll(issued))
        self._rolling[rolling] = issued
        rolling.add_done_callback(self._rolling.pop)

    async def _roll(self, issued: Issued) -> None:
        """Have one group's missing samples made. Waits for a rollout worker, which waits for engines.

        A group that was issued before the run went back waits for its turn first, brought by a published version.
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

    async def _train_forever(self) -> None:
        """Open, step after step, close; a lost trainer interrupts any of them and is replaced."""
        work: Callable[[], Awaitable[None]] = self._open
        while True:
            try:
                await work()
                if self._is_done:
                    return await self._close()
                work = self._one_step
            except TrainerLost as lost:
                work = partial(self._go_back, str(lost))

    @property
    def _is_done(self) -> bool:
        return self._stopping or self._step >= self._settings.max_steps

    async def _open(self) -> None:
        """Bring the trainer's weights to the engines, compare the two, and let the prompts go."""
        await self._stages.publishing.publish(self._tasks, self._step)
        await self._stages.publishing.settled(self._tasks, self._step)
        if broken := await self._stages.comparing.measure(self._tasks, self._step):
            if self._step == 0:
                raise ParityError(f"{broken}; to go on all the same, raise parity.max_mean and parity.max_kl")
            self._observer.alarmed(self._step, broken)
        unfinished, self._unfinished = self._unfinished, ()
        for issued in unfinished:
            self._start(issued)
        self._issuing = self._issuing or self._tasks.start(self._issue_forever())

    async def _one_step(self) -> None:
        """Train, publish, report. Waits for a full batch, filled by `_roll`."""
        waited_from = self._now()
        comparing = self._stages.comparing
        if comparing.is_due(self._step) and (broken := await comparing.measure(self._tasks, self._step)):
            self._observer.alarmed(self._step, broken)
        groups = await self._next_batch()
        if groups is not None:
            await self._train(groups, self._now() - waited_from)

    async def _close(self) -> None:
        await self._stages.publishing.settled(self._tasks, self._step)
        await self._stages.evaluator.finish()
        await self._stages.saving.save(self._step)

    async def _go_back(self, reason: str) -> None:
        """Go on from the newest checkpoint with another trainer: engines stay, and so do all finished samples."""
        stages = self._stages
        stages.evaluator.abandon()
        await stages.keeper.trainer_lost(reason)
        await stages.publishing.committed()
        await stages.saving.finished()
        stages.buffer.flush()
        recovery = await self._restore()
        stages.keeper.trainer_started()
        stages.publishing.begin_anew()
        stages.buffer.restore(recovery.complete)
        stages.pacing.rewind(recovery.step, recovery.num_dropped)
        await self._hold_back()
        self._step = stages.keeper.step = recovery.step
        self._observer.went_back(recovery.step)
        await self._open()

    async def _hold_back(self) -> None:
        """Stop groups whose turn has not come any more: the older weights' tokens would be too old in their turn."""
        is_turn_of = self._stages.pacing.is_turn_of
        early = {rolling: issued for rolling, issued in self._rolling.items() if not is_turn_of(issued.number)}
        for rolling in early:
            rolling.cancel()
        await asyncio.gather(*early, return_exceptions=True)
        for issued in early.values():
            self._start(issued)

    async def _next_batch(self) -> list[Group] | None:
        """Return the oldest full batch, or None when the run is to stop."""
        stages, step = self._stages, self._step + 1
        while not self._stopping:
            dropped = stages.buffer.num_dropped
            groups = stages.buffer.take(self._settings.batch_size, self._step, step)
            stages.pacing.drop(stages.buffer.num_dropped - dropped)
            if groups is not None:
                return groups
            stages.trainer.check()
            await stages.publishing.bring_up(self._tasks, self._step)
            try:
                async with asyncio.timeout(self._settings.quiet_time_s):
                    await stages.buffer.changed()
            except TimeoutError:
                await self._stalled(step)
        return None

    async def _stalled(self, step: int) -> None:
        """Say who waits for whom; replace those responsible the first time, end the run the second time in a row.

        Somebody who is being started is waited for: starting has deadlines of its own.
        """
        settings, stages = self._settings, self._stages
        scene = Scene(
            fleet=stages.fleet,
            crew=stages.crew,
            buffer=stages.buffer,
            pacing=stages.pacing,
            budget=stages.budget,
            trainer=stages.trainer,
            filling=stages.keeper.filling,
        )
        stall = await scene.explain(step, settings.batch_size, settings.quiet_time_s)
        self._observer.stalled(stall.sentence, stall.stacks)
        if stall.is_starting and settings.on_stall == "replace":
            return
        if self._stalled_at == stages.buffer.num_arrived or settings.on_stall == "end" or not stall.suspects:
            raise WorkerFailed(stall.sentence)
        self._stalled_at = stages.buffer.num_arrived
        for name, reason in stall.suspects.items():
            await stages.keeper.lost(name, reason)

    async def _train(self, groups: list[Group], waited_s: float) -> None:
        began = self._now()
        self._tasks.start(self._stages.fleet.measure_load())
        settings, version = self._settings, self._step
        masked_beyond = settings.max_staleness if settings.on_excess == "mask" else None
        request = TrainRequest.of(version + 1, groups, masked_beyond=masked_beyond)
        await self._stages.sharing.to_trainer()
        trained: dict[str, float] = await self._stages.trainer.call(
            "train", request, deadline_s=settings.step_timeout_s
        )
        self._step += 1
        self._stages.keeper.step = self._step
        await self._stages.publishing.committed()
        await self._stages.publishing.publish(self._tasks, self._step)
        seconds = self._now() - began + waited_s
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
            self._stages.evaluator.begin(self._tasks, self._step, self._stages.publishing.serving)
        if settings.checkpoint_every and self._step % settings.checkpoint_every == 0:
            await self._stages.saving.begin(self._tasks, self._step)

    def _metrics(self, groups: list[Group], version: Version) -> dict[str, float]:
        stages = self._stages
        ages = [staleness(group, version) for group in groups]
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
            **stages.publishing.metrics,
            **stages.comparing.metrics,
            **stages.fleet.load,
            **self._vitals.collect(),
            "workers/engines": float(len(stages.fleet.members)),
            "workers/rollouts": float(len(stages.crew.members)),
            "workers/lost": float(stages.keeper.num_lost),
        }

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
