"""`run` and `resume`: make the folder, start the workers, close the circle, leave a summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from areal.app.assembly import Assembly, mixture_of
from areal.app.control import serve_control
from areal.app.observer import RunObserver
from areal.app.resolve import Chosen, Resolved, at_address, resolve
from areal.app.workers import Workers, with_path
from areal.config import RunConfig, dump, load_recipe
from areal.contracts.cluster import Cluster, MakesLoop
from areal.contracts.run import RunInfo
from areal.contracts.specs import TrackerContext
from areal.contracts.tracker import Tracker
from areal.contracts.transfer import Layout
from areal.errors import ConfigError, JournalError, TrainerLost, WorkerDied, WorkerFailed
from areal.flow.buffer.journal import Journal, Recovery
from areal.flow.engine.fleet import START_DEADLINE_S, Fleet
from areal.flow.loop import Loop
from areal.flow.rollout.crew import Crew
from areal.flow.sharing import DeviceSharing, OwnDevices
from areal.flow.trainer.checkpoint import Checkpoints
from areal.flow.trainer.seat import TrainerSeat
from areal.flow.trainer.warmup import warm_up
from areal.flow.trainer.worker import Demonstration
from areal.monitor.folder import RunFolder
from areal.monitor.progress import ProgressView
from areal.monitor.summary import Summary
from areal.monitor.trackers import TrackerGroup
from areal.plugins import Plugins, discover

_log = logging.getLogger(__name__)

T = TypeVar("T")
START_ATTEMPTS = 3
"""What the dead of a run's start have in common after so many is no accident."""
TINY_MODEL = "areal.builtins.models.tiny:write_tiny_model"


def run(config: RunConfig, *, block: Sequence[str] = (), console: Console | None = None) -> Summary:
    """Run a recipe to its end and return what it came to. Raises ArealError in one sentence."""
    plugins = _discover(block)
    resolved = resolve(config, plugins)
    name = config.name or config.model.name or config.environments[0].name
    folder = RunFolder.create(config.runs_dir, name.replace("/", "-"), dump(config))
    return _execute(Controller(resolved, plugins, folder, block, console or Console(), resuming=False))


def resume(
    run: str,
    *,
    runs_dir: str = "runs",
    address: str | None = None,
    block: Sequence[str] = (),
    console: Console | None = None,
) -> Summary:
    """Go on with a run from its last checkpoint. Raises ArealError in one sentence.

    `address`: of the cluster, where it is another than the recipe's.
    """
    folder = RunFolder.find(run, runs_dir)
    plugins = _discover(block)
    config = load_recipe(str(folder.config), resolve=plugins.resolve)
    resolved = resolve(at_address(config, address, plugins), plugins)
    return _execute(Controller(resolved, plugins, folder, block, console or Console(), resuming=True))


def _discover(block: Sequence[str]) -> Plugins:
    """Discover plugins and say which are broken: a run without somebody's hooks must not go by unnoticed."""
    plugins = discover(block)
    for row in plugins.rows():
        if row.state == "broken":
            _log.warning("plugin %s is broken and not used: %s", row.owner, row.reason)
    return plugins


def _execute(controller: Controller) -> Summary:
    cluster = controller.cluster
    try:
        with asyncio.Runner(loop_factory=cluster.new_event_loop if isinstance(cluster, MakesLoop) else None) as runner:
            return runner.run(controller.run())
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
        self.cluster = self._make(resolved.cluster)
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
            await self.cluster.start()
            self._on_signals()  # again: Ray has handlers of its own that print stacks
            stack.push_async_callback(self.cluster.close)
            checkpoint = await self._circle(stack, self.cluster, journal, recovery)
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
        seat = TrainerSeat(workers.trainer, workers.num_ranks)
        crew = Crew(workers.rollout, self._config.rollout.episode_timeout_s)
        fleet = Fleet(workers.engine, crew.use_engines)
        sharing = DeviceSharing(fleet, seat) if self._config.resources.shared else OwnDevices()
        source = await self._start_workers(workers, seat, fleet, crew)
        _check_adapter(source, fleet, self._resolved.engine.component.name)
        deadline_s = self._config.training.step_timeout_s
        keep, journal_bytes = self._config.checkpoint.keep, self._config.journal.max_mb * 2**20
        checkpoints = Checkpoints(seat, journal, self._folder.checkpoints, keep, deadline_s, journal_bytes)

        async def begin() -> Recovery | None:
            await (sharing.to_trainer() if seat.ranks else _refill(seat, sharing))
            if recovery is not None:
                return await self._restore(seat, journal)
            await self._warm_up(seat, crew)
            await checkpoints.save(0)
            return None

        recovery = await self._try_again(begin, died=TrainerLost)
        step = recovery.step if recovery else 0
        view = ProgressView(self._console, step, self._config.training.max_steps)
        stack.callback(view.close)
        observer = RunObserver(view, self._trackers(stack, view), self._plugins, self._folder)
        assembly = Assembly(self._resolved, self._plugins, self._folder)
        stages = assembly.stages(cluster, seat, source, fleet, crew, journal, observer, sharing, checkpoints, recovery)
        self._loop = Loop(
            assembly.settings(),
            stages,
            lambda: self._replace_trainer(seat, sharing, journal),
            observer,
            step,
        )
        await stack.enter_async_context(serve_control(self._folder, stages.keeper))
        self._announce_start(step)
        unfinished = [issued for issued, _ in recovery.unfinished] if recovery else []
        try:
            last = await self._loop.run(unfinished)
        except WorkerFailed as error:
            raise WorkerFailed(f"{error}; go on from what was saved with: areal resume {self._folder.path}") from error
        return await checkpoints.save(last)

    async def _replace_trainer(self, seat: TrainerSeat, sharing: OwnDevices, journal: Journal) -> Recovery:
        """Fill the seat again and go back to the newest checkpoint; TrainerLost when that fails, too."""
        await _refill(seat, sharing)
        return await self._restore(seat, journal)

    async def _restore(self, seat: TrainerSeat, journal: Journal) -> Recovery:
        """Load the newest checkpoint that is whole and go back to it; JournalError when there is none.

        Nothing is forgotten before a checkpoint has been loaded.
        """
        damaged: list[int] = []
        for step, path in reversed(journal.checkpoints()):
            try:
                folder = str(self._folder.path / path)
                await seat.load(folder, self._config.training.step_timeout_s)
            except JournalError as error:
                self._console.print(f"warning: {error}", highlight=False, soft_wrap=True)
                damaged.append(step)
                continue
            for newer in damaged:
                journal.forget_checkpoint(newer)
            return journal.recover()
        raise JournalError(
            f"none of the checkpoints in {self._folder.checkpoints} can be read; see the warnings above, "
            "put a copy of one back, or start anew with areal run"
        )

    async def _start_workers(self, workers: Workers, seat: TrainerSeat, fleet: Fleet, crew: Crew) -> Layout:
        """Start everything side by side and return the trainer's layout: most of the time goes into imports.

        Fewer engines and rollout workers than asked for are borne down to the recipe's fewest, deaths see `_try_again`.
        """
        self._console.print(f"run {self._folder.path.name}: starting workers", highlight=False, soft_wrap=True)
        await workers.reserve()
        engine, rollout = self._config.engine, self._config.rollout
        others = asyncio.gather(
            _some_of(engine.min, engine.replicas, lambda: self._try_again(fleet.add)),
            _some_of(rollout.min, rollout.workers, lambda: self._try_again(crew.add)),
        )

        async def start_trainer() -> Layout:
            await seat.fill()
            if not self._resolved.model_path and not self._folder.model.exists():
                model = self._config.model
                arguments = (str(self._folder.model), self._config.seed, model.num_experts, model.top_k)
                await seat.call_first("prepare", TINY_MODEL, *arguments, deadline_s=START_DEADLINE_S)
            workers.model_is_there.set()
            return await seat.start(START_DEADLINE_S)

        try:
            source = await self._try_again(start_trainer)
            for error in [error for errors in await others for error in errors]:
                self._console.print(f"warning: {error}; trying again later", highlight=False, soft_wrap=True)
        finally:
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)
        return source

    async def _try_again(self, work: Callable[[], Awaitable[T]], died: type[WorkerFailed] = WorkerDied) -> T:
        """Do what nobody watches yet, and when a worker has `died` in it, which may be an accident, do it again."""
        for _ in range(START_ATTEMPTS - 1):
            try:
                return await work()
            except (died, TrainerLost) as error:
                self._console.print(f"warning: {error}; trying again", highlight=False, soft_wrap=True)
        return await work()

    async def _warm_up(self, trainer: TrainerSeat, crew: Crew) -> None:
        spec = self._config.training.warmup
        if not spec.steps:
            return
        mixture = mixture_of(self._config, crew, f"{self._config.seed}/warm-up")
        deadline_s = self._config.training.step_timeout_s

        async def demonstrate(num: int) -> Sequence[Demonstration]:
            draws = [mixture.next() for _ in range(num)]
            return await crew.ask_any("demonstrations", draws, deadline_s=deadline_s)

        losses: list[float] = []
        await warm_up(trainer, demonstrate, spec, self._resolved.sft, lambda _, loss: losses.append(loss), deadline_s)
        self._console.print(
            f"supervised warm-up: {spec.steps} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}", highlight=False
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
            else:
                again = f"stopped; go on from what was saved with: areal resume {self._folder.path}"
                self._console.print(again, highlight=False, soft_wrap=True)
            if task is not None:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)


def _check_adapter(source: Layout, fleet: Fleet, engine: str) -> None:
    """Raise ConfigError when the trainer publishes a LoRA adapter that the engines cannot serve."""
    for member in fleet.members.values():
        if source.adapter is not None and source.adapter.rank > (most := member.layout.max_adapter_rank):
            can = f"serves LoRA adapters of rank {most} at most" if most else "as it is set serves no LoRA adapters"
            raise ConfigError(
                f"the trainer publishes a LoRA adapter of rank {source.adapter.rank} and engine {engine!r} {can}; let "
                "the backend publish merged weights, or set the engine (vllm: enable_lora, max_lora_rank) for it"
            )


async def _refill(seat: TrainerSeat, sharing: OwnDevices) -> None:
    """Let another trainer load its model, while nobody sits in the seat; TrainerLost when that fails, too."""
    await sharing.to_engines()
    try:
        await seat.fill()
    except WorkerFailed as error:
        raise TrainerLost(str(error)) from error
    await sharing.to_trainer()
    await seat.start(START_DEADLINE_S)


async def _some_of(fewest: int, wanted: int, start: Callable[[], Awaitable[str]]) -> list[WorkerFailed]:
    """Start so many side by side; return the failures if at least `fewest` have started, else raise the first."""
    results = await asyncio.gather(*(start() for _ in range(wanted)), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    borne = [failure for failure in failures if isinstance(failure, WorkerFailed)]
    if len(borne) < len(failures) or len(results) - len(failures) < fewest:
        raise next((failure for failure in failures if failure not in borne), failures[0])
    return borne
