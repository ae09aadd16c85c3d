"""What each worker process is made of: its arguments, its share of the machine, its resources."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from areal.app.resolve import Resolved
from areal.contracts.cluster import Cluster, Handle, Reserves, Room, WorkerSpec
from areal.contracts.specs import BackendContext, EngineContext, ModelSpec
from areal.monitor.folder import RunFolder
from areal.plugins import Plugins, discover


class Workers:
    """Spawns the run's workers. Invariant: the threads of all heavy workers together are at most the machine's cores.

    OpenMP threads that spin at barriers while other processes wait for the core cost 5x to 20x, so engines and
    trainer share the cores out between them, and everybody waits passively. On a shared device they take turns, and so
    they do on the cores.
    """

    def __init__(
        self, resolved: Resolved, model: ModelSpec, cluster: Cluster, folder: RunFolder, blocked: Sequence[str]
    ) -> None:
        self._resolved = resolved
        self._model = model
        self._cluster = cluster
        self._folder = folder
        self._blocked = tuple(blocked)
        self.model_is_there = asyncio.Event()
        """Engines and rollout workers start at once and are handed over when the model can be loaded."""

    async def reserve(self) -> None:
        """Hold room for everybody at once, where the cluster can be full; WorkerFailed when the run does not fit.

        The recipe's fewest engines are enough to begin with.
        """
        if not isinstance(self._cluster, Reserves):
            return
        config = self._resolved.config
        trainer = self._resources("trainer", 1)
        engine = self._resources("engine", self._engine_devices)
        if config.resources.shared:
            await self._cluster.reserve(
                [Room(kind="trainer", resources=trainer, count=1, least=1, beside={"engine": engine})]
            )
            return
        rooms = [
            Room(
                kind="trainer",
                resources=trainer,
                count=self.num_ranks,
                least=self.num_ranks,
                apart=config.resources.train.num_nodes > 1,
                together=config.trainer_devices.per_node,
            ),
            Room(kind="engine", resources=engine, count=config.engine.replicas, least=config.engine.min),
        ]
        await self._cluster.reserve(rooms)

    async def trainer(self, name: str, rank: int) -> Handle:
        config, resolved = self._resolved.config, self._resolved
        context = BackendContext(
            model=self._model,
            training=config.training,
            accelerator=resolved.accelerator,
            seed=config.seed,
            rank=rank,
            devices=config.trainer_devices,
        )
        args = (
            resolved.backend.component,
            resolved.backend.options,
            context,
            resolved.algorithm.component,
            resolved.algorithm.options,
            config.sampling.temperature,
        )
        factory = "areal.flow.trainer.worker:TrainerWorker"
        return await self._spawn(name, "trainer", factory, args, 1, place=rank)

    async def engine(self, name: str) -> Handle:
        config, resolved = self._resolved.config, self._resolved
        context = EngineContext(
            model=self._model,
            accelerator=resolved.accelerator,
            name=name,
            seed=config.seed,
            log_dir=str(self._folder.path / "logs"),
            devices=self._engine_devices,
            parallel=config.resources.infer.parallel,
        )
        prepare = f"{__name__}:{announce_engine_process.__name__}"
        args = (resolved.engine.component, resolved.engine.options, context, prepare, self._blocked)
        factory = "areal.flow.engine.worker:EngineWorker"
        handle = await self._spawn(name, "engine", factory, args, self._engine_devices)
        await self.model_is_there.wait()
        return handle

    async def rollout(self, name: str) -> Handle:
        config = self._resolved.config
        args = (
            self._resolved.environments,
            self._model.path,
            config.sampling,
            config.seed,
            config.rollout.episode_timeout_s,
        )
        handle = await self._spawn(name, "rollout", "areal.flow.rollout.worker:RolloutWorker", args, 0)
        await self.model_is_there.wait()
        return handle

    async def _spawn(
        self, name: str, kind: str, factory: str, args: tuple[object, ...], devices: int, place: int | None = None
    ) -> Handle:
        return await self._cluster.spawn(
            WorkerSpec(
                name=name,
                kind=kind,
                factory=factory,
                args=args,
                environment=self._environment(kind, devices),
                resources=self._resources(kind, devices),
                place=place,
                python=self._resolved.engine_python if kind == "engine" else "",
            )
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer, one device each."""
        return self._resolved.config.trainer_devices.world_size

    @property
    def _engine_devices(self) -> int:
        """Devices of one engine replica."""
        config = self._resolved.config
        return max(1, config.resources.infer.total // config.engine.replicas)

    def _environment(self, kind: str, devices: int) -> Mapping[str, str]:
        config = self._resolved.config
        cores = len(os.sched_getaffinity(0))
        # An engine that slices its model computes in one process a device.
        ranks = 1 if config.resources.infer.parallel == "dp" else self._engine_devices
        heavy = 1 if config.resources.shared else self.num_ranks + config.engine.replicas * ranks
        threads = 1 if kind == "rollout" else max(1, cores // heavy)
        return self._resolved.accelerator.environment(devices, threads)

    def _resources(self, kind: str, devices: int) -> Mapping[str, float]:
        side = {"trainer": "train", "engine": "infer"}.get(kind)
        if side is None:
            return {}
        device = self._resolved.accelerator.resource
        share = 0.5 if self._resolved.config.resources.shared else 1.0
        return {side: float(devices)} | ({device: devices * share} if device else {})


def announce_engine_process(name: str, blocked: Sequence[str]) -> None:
    """Tell plugins, inside an engine's process and before its library is imported, that this is one."""
    _plugins_of_this_process(tuple(blocked)).announce("areal_engine_process", name=name)


@cache
def _plugins_of_this_process(blocked: tuple[str, ...]) -> Plugins:
    # In an environment of its own (`engine.python`) there may be other plugins than the controller's.
    return discover(blocked, missing_ok=True)


def with_path(model: ModelSpec, path: str) -> ModelSpec:
    return replace(model, path=path)
