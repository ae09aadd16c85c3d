"""From a recipe and running workers to the loop's stages."""

from __future__ import annotations

from collections.abc import Callable

from areal.app.observer import RunObserver
from areal.app.resolve import Chosen, Resolved, choose
from areal.config import RunConfig
from areal.contracts.algorithm import SELECTS_GROUPS, SelectsGroups
from areal.contracts.cluster import Cluster
from areal.contracts.messages import Group
from areal.contracts.transfer import Layout
from areal.flow.buffer.buffer import ReplayBuffer
from areal.flow.buffer.journal import Journal, Recovery
from areal.flow.comparing import Comparing, ParitySettings
from areal.flow.engine.fleet import Fleet
from areal.flow.evaluator import Evaluator
from areal.flow.keeper import Bounds as WorkerBounds
from areal.flow.keeper import Keeper, KeeperSettings
from areal.flow.loop import LoopSettings, Stages
from areal.flow.prompts.mixture import Mixture, Source
from areal.flow.prompts.pacing import Pacing
from areal.flow.publishing import Publishing
from areal.flow.restarts import Restarts
from areal.flow.rollout.budget import FailureBudget
from areal.flow.rollout.crew import Crew
from areal.flow.saving import Saving
from areal.flow.sharing import DeviceSharing, OwnDevices
from areal.flow.trainer.checkpoint import Checkpoints
from areal.flow.trainer.parity import Bounds
from areal.flow.trainer.seat import TrainerSeat
from areal.flow.weights.publisher import Publisher
from areal.monitor.folder import RunFolder
from areal.plugins import Plugins

PUBLISH_DEADLINE_S = 300.0
"""A publish that takes longer is a fault, not a large model."""


class Assembly:
    """Makes the stages of one run. Invariant: the same recipe gives the same stages, whatever was restarted before."""

    def __init__(self, resolved: Resolved, plugins: Plugins, folder: RunFolder) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._plugins = plugins
        self._folder = folder

    def stages(
        self,
        cluster: Cluster,
        seat: TrainerSeat,
        source: Layout,
        fleet: Fleet,
        crew: Crew,
        journal: Journal,
        observer: RunObserver,
        sharing: OwnDevices,
        checkpoints: Checkpoints,
        recovery: Recovery | None,
    ) -> Stages:
        """`source`: the trainer's layout; `recovery`: what an earlier controller left, if there was one."""
        config = self._config
        keeper = Keeper(
            self._keeper_settings(),
            cluster=cluster,
            seat=seat,
            fleet=fleet,
            crew=crew,
            restarts=Restarts(
                most=config.failures.max_restarts,
                window_s=config.failures.window_s,
                backoff_s=config.failures.backoff_s,
            ),
            ledger=journal,
            listener=observer,
        )
        if isinstance(sharing, DeviceSharing):
            sharing.lost = keeper.lost
        pacing = self._pacing(recovery)
        mixture, buffer = self._filled(crew, journal, recovery)
        publishing = Publishing(
            publisher=self._publisher(seat, source, fleet),
            fleet=fleet,
            journal=journal,
            pacing=pacing,
            keeper=keeper,
            sharing=sharing,
            told=observer.weights_published,
            wake=buffer.wake,
        )
        return Stages(
            trainer=seat,
            keeper=keeper,
            evaluator=Evaluator(crew, journal, observer, config.evaluation.num_prompts),
            fleet=fleet,
            crew=crew,
            mixture=mixture,
            pacing=pacing,
            buffer=buffer,
            journal=journal,
            publishing=publishing,
            comparing=Comparing(
                self._parity_settings(), trainer=seat, crew=crew, publishing=publishing, sharing=sharing
            ),
            saving=Saving(checkpoints),
            sharing=sharing,
            budget=FailureBudget(max_share=config.rollout.max_failed_share, window=config.rollout.failure_window),
        )

    def _pacing(self, recovery: Recovery | None) -> Pacing:
        return Pacing(
            batch_size=self._config.training.batch_size,
            max_staleness=self._config.staleness.max,
            max_steps=self._config.training.max_steps,
            served=recovery.step if recovery else 0,
            num_issued=recovery.num_issued if recovery else 0,
            num_dropped=recovery.num_dropped if recovery else 0,
        )

    def _filled(self, crew: Crew, journal: Journal, recovery: Recovery | None) -> tuple[Mixture, ReplayBuffer]:
        """Return the order of prompts and the buffer, both where an earlier controller left them."""
        config = self._config
        mixture = mixture_of(config, crew, config.seed)
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
        return mixture, buffer

    def _publisher(self, seat: TrainerSeat, source: Layout, fleet: Fleet) -> Publisher:
        reshard = self._resolved.reshard
        if reshard is None:
            target = next(iter(fleet.members.values())).layout
            name = self._plugins.ask("areal_choose_resharder", source=source, target=target) or "disk"
            reshard = choose(self._plugins, "resharder", name, {})
        return Publisher(
            seat,
            source,
            reshard.component,
            reshard.options,
            str(self._folder.path),
            PUBLISH_DEADLINE_S,
            overlaps=self._config.reshard.overlap,
        )

    def settings(self) -> LoopSettings:
        config = self._config
        return LoopSettings(
            batch_size=config.training.batch_size,
            group_size=config.algorithm.group_size,
            max_steps=config.training.max_steps,
            max_staleness=config.staleness.max,
            on_excess=config.staleness.on_excess,
            step_timeout_s=config.training.step_timeout_s,
            quiet_time_s=self._quiet_time_s,
            on_stall=config.failures.on_stall,
            max_buffer_bytes=config.rollout.max_buffer_mb << 20,
            evaluate_every=config.evaluation.every_steps,
            checkpoint_every=config.checkpoint.every_steps,
        )

    @property
    def _quiet_time_s(self) -> float:
        return self._config.failures.quiet_time_s or 2 * self._config.rollout.episode_timeout_s

    def _parity_settings(self) -> ParitySettings:
        parity = self._config.parity
        return ParitySettings(
            prompts=parity.prompts,
            every=parity.every_steps,
            bounds=Bounds(mean=parity.max_mean, kl=parity.max_kl),
            answer_s=self._quiet_time_s,
            deadline_s=self._config.training.step_timeout_s,
        )

    def _keeper_settings(self) -> KeeperSettings:
        engine, rollout = self._config.engine, self._config.rollout
        most = 1 if self._config.resources.shared else engine.max
        return KeeperSettings(
            hang_timeout_s=self._config.failures.hang_timeout_s,
            bounds={
                "engine": WorkerBounds(fewest=engine.min, wanted=engine.replicas, most=most),
                "rollout": WorkerBounds(fewest=rollout.min, wanted=rollout.workers, most=rollout.max),
            },
        )


def mixture_of(config: RunConfig, crew: Crew, seed: int | str) -> Mixture:
    """Return the order of training prompts that a seed decides."""
    return Mixture(
        [
            Source(name=entry.name, weight=entry.weight, num_prompts=crew.num_prompts[entry.name]["train"])
            for entry in config.environments
        ],
        seed,
    )


def _selection(algorithm: Chosen) -> Callable[[Group], bool] | None:
    """Return how the algorithm selects groups; only one that says it does is loaded here, where torch is not."""
    if SELECTS_GROUPS not in algorithm.component.capabilities:
        return None
    made: SelectsGroups = algorithm.component.load()(algorithm.options)
    return made.keep
