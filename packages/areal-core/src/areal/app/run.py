"""`run` and `resume`: make the folder, start the workers, close the circle, leave a summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from areal.app.resolve import Chosen, Resolved, choose, resolve
from areal.app.workers import Workers, with_path
from areal.config import RunConfig, dump, load_recipe
from areal.contracts.algorithm import SELECTS_GROUPS, SelectsGroups
from areal.contracts.cluster import Cluster, Handle
from areal.contracts.messages import Group, StepReport, Version
from areal.contracts.run import RunInfo
from areal.contracts.specs import TrackerContext
from areal.contracts.tracker import Tracker
from areal.contracts.transfer import Layout
from areal.errors import JournalError, WorkerFailed
from areal.flow.buffer.buffer import ReplayBuffer
from areal.flow.buffer.journal import Journal, Recovery
from areal.flow.engine.fleet import START_DEADLINE_S, Fleet
from areal.flow.loop import Loop, LoopSettings, Stages
from areal.flow.prompts.mixture import Mixture, Source
from areal.flow.prompts.pacing import Pacing
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew
from areal.flow.trainer.checkpoint import Checkpoints
from areal.flow.trainer.parity import Bounds
from areal.flow.trainer.warmup import warm_up
from areal.flow.trainer.worker import Demonstration
from areal.flow.weights.publisher import Publisher
from areal.monitor.folder import RunFolder
from areal.monitor.progress import ProgressView
from areal.monitor.summary import Summary
from areal.monitor.trackers import TrackerGroup
from areal.plugins import Plugins, discover

_log = logging.getLogger(__name__)

PUBLISH_DEADLINE_S = 300.0
"""A publish that takes longer is a fault, not a large model."""
TINY_MODEL = "areal.builtins.models.tiny:write_tiny_model"
MAX_RESTARTS = 8
"""Replacements of engines, and of rollout workers, before a run gives up and says why."""


def run(config: RunConfig, *, block: Sequence[str] = (), console: Console | None = None) -> Summary:
    """Run a recipe to its end and return what it came to. Raises ArealError in one sentence."""
    plugins = _discover(block)
    resolved = resolve(config, plugins)
    name = config.name or config.model.name or config.environments[0].name
    folder = RunFolder.create(config.runs_dir, name.replace("/", "-"), dump(config))
    return _execute(Controller(resolved, plugins, folder, block, console or Console(), resuming=False))


def resume(run: str, *, runs_dir: str = "runs", block: Sequence[str] = (), console: Console | None = None) -> Summary:
    """Go on with a run from its last checkpoint. Raises ArealError in one sentence."""
    folder = RunFolder.find(run, runs_dir)
    plugins = _discover(block)
    resolved = resolve(load_recipe(str(folder.config), resolve=plugins.resolve), plugins)
    return _execute(Controller(resolved, plugins, folder, block, console or Console(), resuming=True))


def _discover(block: Sequence[str]) -> Plugins:
    """Discover plugins and say which are broken: a run without somebody's hooks must not go by unnoticed."""
    plugins = discover(block)
    for row in plugins.rows():
        if row.state == "broken":
            _log.warning("plugin %s is broken and not used: %s", row.owner, row.reason)
    return plugins


def _execute(controller: Controller) -> Summary:
    try:
        return asyncio.run(controller.run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # the second Ctrl-C


class Controller:
    """The control plane of one run. Invariant: whatever happens, workers, journal and trackers are closed."""

    def __init__(
        self,
        resolved: Resolved,
        plugins: Plugins,
        folder: RunFolder,
        block: Sequence[str],
        console: Console,
        *,
        resuming: bool,
    ) -> None:
        self._began = time.perf_counter()
        self._resolved = resolved
        self._config = resolved.config
        self._plugins = plugins
        self._folder = folder
        self._block = block
        self._console = console
        self._resuming = resuming
        self._loop: Loop | None = None
        self._interrupted = False

    async def run(self) -> Summary:
        self._on_signals()
        async with AsyncExitStack() as stack:
            self._folder.lock()
            stack.callback(self._folder.unlock)
            journal = Journal(self._folder.journal, create=not self._resuming)
            stack.callback(journal.close)
            recovery = journal.recover() if self._resuming else None
            cluster: Cluster = self._make(self._resolved.cluster)
            await cluster.start()
            stack.push_async_callback(cluster.close)
            checkpoint = await self._circle(stack, cluster, journal, recovery)
            steps, evaluations = journal.metrics(), journal.metrics("evaluations")
        summary = Summary(
            name=self._folder.path.name,
            folder=self._folder.path,
            checkpoint=checkpoint / "model",
            seconds=time.perf_counter() - self._began,
            steps=steps,
            evaluations=evaluations,
        )
        summary.show(self._console)
        return summary

    def _make(self, chosen: Chosen) -> Cluster:
        return chosen.component.load()(chosen.options, str(self._folder.path))

    async def _circle(
        self, stack: AsyncExitStack, cluster: Cluster, journal: Journal, recovery: Recovery | None
    ) -> Path:
        """Start the workers, connect the stages, go round; return the last checkpoint's folder."""
        model = with_path(self._config.model, self._resolved.model_path or str(self._folder.model))
        workers = Workers(self._resolved, model, cluster, self._folder, self._block)
        crew = Crew(workers.rollout, self._config.rollout.episode_timeout_s, MAX_RESTARTS)
        fleet = Fleet(workers.engine, crew.use_engines, MAX_RESTARTS)
        trainer, source = await self._start_workers(workers, fleet, crew)
        deadline_s = self._config.training.step_timeout_s
        keep, journal_bytes = self._config.checkpoint.keep, self._config.journal.max_mb * 2**20
        checkpoints = Checkpoints(trainer, journal, self._folder.checkpoints, keep, deadline_s, journal_bytes)
        if recovery is None:
            await self._warm_up(trainer, crew)
            await checkpoints.save(0)
        else:
            recovery = await self._restore(trainer, journal, recovery)
        step = recovery.step if recovery else 0
        view = ProgressView(self._console, step, self._config.training.max_steps)
        stack.callback(view.close)
        observer = RunObserver(view, self._trackers(stack, view), self._plugins)
        stages = self._stages(cluster, trainer, source, fleet, crew, journal, recovery)
        self._loop = Loop(self._settings(), stages, checkpoints.save, observer, step)
        self._announce_start(step)
        unfinished = [issued for issued, _ in recovery.unfinished] if recovery else []
        try:
            last = await self._loop.run(unfinished)
        except WorkerFailed as error:
            raise WorkerFailed(f"{error}; go on from what was saved with: areal resume {self._folder.path}") from error
        return await checkpoints.save(last)

    async def _restore(self, trainer: Handle, journal: Journal, newest: Recovery) -> Recovery:
        """Load the newest checkpoint that is whole and go back to it; JournalError when there is none.

        `newest`: the recovery to the newest one. Nothing is forgotten before another one has been loaded.
        """
        damaged: list[int] = []
        for step, path in reversed(journal.checkpoints()):
            try:
                folder = str(self._folder.path / path)
                await trainer.call("load", folder, deadline_s=self._config.training.step_timeout_s)
            except JournalError as error:
                self._console.print(f"warning: {error}", highlight=False, soft_wrap=True)
                damaged.append(step)
                continue
            for newer in damaged:
                journal.forget_checkpoint(newer)
            return journal.recover() if damaged else newest
        raise JournalError(
            f"none of the checkpoints in {self._folder.checkpoints} can be read; see the warnings above, "
            "put a copy of one back, or start anew with areal run"
        )

    async def _start_workers(self, workers: Workers, fleet: Fleet, crew: Crew) -> tuple[Handle, Layout]:
        """Start everything side by side: most of the time goes into importing libraries."""
        self._console.print(f"run {self._folder.path.name}: starting workers", highlight=False, soft_wrap=True)

        async def start_trainer() -> tuple[Handle, Layout]:
            trainer = await workers.trainer()
            if not self._resolved.model_path and not self._folder.model.exists():
                await trainer.call(
                    "prepare", TINY_MODEL, str(self._folder.model), self._config.seed, deadline_s=START_DEADLINE_S
                )
            workers.model_is_there.set()
            return trainer, await trainer.call("start", deadline_s=START_DEADLINE_S)

        replicas = [fleet.add() for _ in range(self._config.engine.replicas)]
        players = [crew.add() for _ in range(self._config.rollout.workers)]
        started, _ = await asyncio.gather(start_trainer(), asyncio.gather(*replicas, *players))
        return started

    async def _warm_up(self, trainer: Handle, crew: Crew) -> None:
        spec = self._config.training.warmup
        if not spec.steps:
            return
        mixture = self._mixture(crew, f"{self._config.seed}/warm-up")
        deadline_s = self._config.training.step_timeout_s

        async def demonstrate(num: int) -> Sequence[Demonstration]:
            draws = [mixture.next() for _ in range(num)]
            return await crew.any().call("demonstrations", draws, deadline_s=deadline_s)

        losses: list[float] = []
        await warm_up(trainer, demonstrate, spec, self._resolved.sft, lambda _, loss: losses.append(loss), deadline_s)
        self._console.print(
            f"supervised warm-up: {spec.steps} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}", highlight=False
        )

    def _mixture(self, crew: Crew, seed: int | str) -> Mixture:
        sources = [
            Source(name=entry.name, weight=entry.weight, num_prompts=crew.num_prompts[entry.name]["train"])
            for entry in self._config.environments
        ]
        return Mixture(sources, seed)

    def _stages(
        self,
        cluster: Cluster,
        trainer: Handle,
        source: Layout,
        fleet: Fleet,
        crew: Crew,
        journal: Journal,
        recovery: Recovery | None,
    ) -> Stages:
        config = self._config
        reshard = self._resolved.reshard or self._choose_resharder(source, fleet)
        mixture = self._mixture(crew, config.seed)
        buffer = ReplayBuffer(
            journal,
            max_staleness=config.staleness.max,
            on_excess=config.staleness.on_excess,
            order=config.staleness.order,
            keep=_selection(self._resolved.algorithm),
        )
        if recovery:
            mixture.skip_to(recovery.num_issued)
            buffer.restore(recovery.complete, [issued for issued, _ in recovery.unfinished])
        return Stages(
            cluster=cluster,
            trainer=trainer,
            fleet=fleet,
            crew=crew,
            mixture=mixture,
            pacing=Pacing(
                batch_size=config.training.batch_size,
                max_staleness=config.staleness.max,
                max_steps=config.training.max_steps,
                served=recovery.step if recovery else 0,
                num_issued=recovery.num_issued if recovery else 0,
                num_dropped=recovery.num_dropped if recovery else 0,
            ),
            buffer=buffer,
            journal=journal,
            publisher=Publisher(
                trainer, source, reshard.component, reshard.options, str(self._folder.path), PUBLISH_DEADLINE_S
            ),
            budget=FailureBudget(max_share=config.rollout.max_failed_share, window=config.rollout.failure_window),
        )

    def _choose_resharder(self, source: Layout, fleet: Fleet) -> Chosen:
        target = next(iter(fleet.members.values())).layout
        name = self._plugins.ask("areal_choose_resharder", source=source, target=target) or "disk"
        return choose(self._plugins, "resharder", name, {})

    def _settings(self) -> LoopSettings:
        config = self._config
        return LoopSettings(
            batch_size=config.training.batch_size,
            group_size=config.algorithm.group_size,
            max_steps=config.training.max_steps,
            max_staleness=config.staleness.max,
            on_excess=config.staleness.on_excess,
            step_timeout_s=config.training.step_timeout_s,
            quiet_time_s=config.rollout.quiet_time_s,
            evaluate_every=config.evaluation.every_steps,
            evaluation_prompts=config.evaluation.num_prompts,
            checkpoint_every=config.checkpoint.every_steps,
            parity_prompts=config.parity.prompts,
            parity_every=config.parity.every_steps,
            parity_bounds=Bounds(mean=config.parity.max_mean, kl=config.parity.max_kl),
        )

    def _trackers(self, stack: AsyncExitStack, view: ProgressView) -> TrackerGroup:
        context = TrackerContext(
            run_name=self._folder.path.name,
            run_dir=str(self._folder.path),
            config=self._config.model_dump(mode="json"),
        )
        made: list[tuple[str, Tracker]] = [
            (name, chosen.component.load()(chosen.options, context)) for name, chosen in self._resolved.trackers
        ]
        group = TrackerGroup(made, view.say)
        stack.callback(group.close)
        return group

    def _announce_start(self, step: int) -> None:
        info = RunInfo(
            name=self._folder.path.name,
            folder=str(self._folder.path),
            config=self._config.model_dump(mode="json"),
            start_step=step,
        )
        self._plugins.announce("areal_run_started", run=info)

    def _on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def interrupt() -> None:
            if self._loop is not None and not self._interrupted:
                self._interrupted = True
                self._console.print("finishing the step, then saving; Ctrl-C again stops now", highlight=False)
                self._loop.stop()
                return
            if self._loop is None:
                self._console.print("stopping before the first step", highlight=False)
            if task is not None:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)


def _selection(algorithm: Chosen) -> Callable[[Group], bool] | None:
    """Return how the algorithm selects groups; only one that says it does is loaded here, where torch is not."""
    if SELECTS_GROUPS not in algorithm.component.capabilities:
        return None
    made: SelectsGroups = algorithm.component.load()(algorithm.options)
    return made.keep


STEPS_BETWEEN_ALARMS = 20
"""A disagreement that lasts is said again after so many steps."""


class RunObserver:
    """Who hears of steps: the bar, the trackers, the plugins. Invariant: none of them can stop the run."""

    def __init__(self, view: ProgressView, trackers: TrackerGroup, plugins: Plugins) -> None:
        self._view = view
        self._trackers = trackers
        self._plugins = plugins
        self._alarmed_at: int | None = None

    def step_finished(self, report: StepReport) -> None:
        self._view.step_finished(report)
        self._trackers.log(report.step, report.metrics)
        self._plugins.announce("areal_step_finished", report=report)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.say(f"evaluation after step {step}: reward {metrics.get('eval/reward/mean', float('nan')):.3f}")
        self._trackers.log(step, metrics)

    def alarmed(self, step: int, sentence: str) -> None:
        if self._alarmed_at is None or step >= self._alarmed_at + STEPS_BETWEEN_ALARMS:
            self._alarmed_at = step
            self._view.say(f"warning, step {step}: {sentence}")

    def replaced(self, name: str, reason: str) -> None:
        self._view.say(f"{name} was lost and is replaced: {reason.splitlines()[0]}")

    def weights_published(self, version: Version) -> None:
        self._plugins.announce("areal_weights_published", version=version)
