"""From a recipe's names to components with validated options; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from areal import env
from areal.app.interpreter import find_interpreter, package_of
from areal.builtins.models.registry import resolve as resolve_model
from areal.config.schema import AUTO, RunConfig
from areal.contracts.accelerator import Accelerator
from areal.contracts.algorithm import AlgorithmOptions
from areal.contracts.backend import DISTRIBUTED, DistributedOptions
from areal.contracts.component import OFFLOAD, Component
from areal.errors import ConfigError
from areal.flow.rollout.worker import EnvironmentChoice
from areal.plugins import Plugins

INLINE = "inline"
"""The cluster without processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A component with its options. Invariant: `options` were validated by the component's own class."""

    component: Component
    options: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Everything a recipe names, found and validated. Invariant: every component's library is where it will run."""

    config: RunConfig
    model_path: str
    """Empty for the bundled tiny model."""
    accelerator: Accelerator
    engine: Chosen
    engine_python: str
    """Absolute path of the engines' interpreter; empty: this one."""
    backend: Chosen
    algorithm: Chosen
    sft: Component
    cluster: Chosen
    reshard: Chosen | None
    """None: chosen when both layouts are known."""
    environments: tuple[EnvironmentChoice, ...]
    trackers: tuple[tuple[str, Chosen], ...]


def resolve(config: RunConfig, plugins: Plugins) -> Resolved:
    """Find and validate everything the recipe names.

    Raises UnknownComponent, MissingLibrary or ConfigError in one sentence.
    """
    accelerator = _accelerator(config.device, plugins)
    engine, engine_python = _engine(config, plugins, accelerator)
    backend = choose(plugins, "backend", config.backend.name, config.backend.options)
    _check_devices(config, backend)
    _check_sharing(config, plugins, engine=engine.component, backend=backend.component)
    algorithm = choose(plugins, "algorithm", config.algorithm.name, config.algorithm.options)
    _check_group_size(config, algorithm.options)
    return Resolved(
        config=config,
        model_path=resolve_model(config.model.path),
        accelerator=accelerator,
        engine=engine,
        engine_python=engine_python,
        backend=backend,
        algorithm=algorithm,
        sft=plugins.resolve("algorithm", "sft"),
        cluster=choose(plugins, "cluster", _cluster_name(config), config.cluster.options),
        reshard=None
        if config.reshard.name == AUTO
        else choose(plugins, "resharder", config.reshard.name, config.reshard.options),
        environments=tuple(
            EnvironmentChoice(name=entry.name, component=chosen.component, options=chosen.options)
            for entry in config.environments
            for chosen in [choose(plugins, "environment", entry.type, entry.options)]
        ),
        trackers=tuple(
            (tracker.name, choose(plugins, "tracker", tracker.name, tracker.options)) for tracker in config.trackers
        ),
    )


def at_address(config: RunConfig, address: str | None, plugins: Plugins) -> RunConfig:
    """Return the recipe with its cluster at this address; None leaves it as it is.

    ConfigError when the cluster is of a kind that has no address.
    """
    if address is None:
        return config
    name = _cluster_name(config)
    if "address" not in plugins.resolve("cluster", name).options_class().model_fields:
        raise ConfigError(
            f"--address {address} names a cluster to join and the cluster {name!r} joins none; use --cluster ray "
            "(without AREAL_DEBUG_MODE), or leave --address out"
        )
    joined = config.cluster.model_copy(update={"address": address})
    return config.model_copy(update={"cluster": joined})


def choose(plugins: Plugins, kind: str, name: str, table: dict[str, Any]) -> Chosen:
    """Return one component with its validated options; ConfigError names the key that is wrong."""
    component = plugins.resolve(kind, name)
    component.check_installed()
    return _with_options(kind, component, table)


def _with_options(kind: str, component: Component, table: dict[str, Any]) -> Chosen:
    try:
        return Chosen(component=component, options=component.parse_options(table))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "options"
        raise ConfigError(f"{kind} {component.name!r} does not take {key!r} as given: {first['msg']}") from error


def _engine(config: RunConfig, plugins: Plugins, accelerator: Accelerator) -> tuple[Chosen, str]:
    """Return the engine and its interpreter; its library is looked for in that one."""
    name, options = config.engine.name, config.engine.options
    if not config.engine.python:
        return choose(plugins, "engine", name, options), ""
    if _cluster_name(config) == INLINE:
        why = "AREAL_DEBUG_MODE asks for" if env.debug_mode() else "the recipe names"
        raise ConfigError(
            f"'engine.python' needs worker processes and {why} the cluster {INLINE!r}, which has none; use cluster "
            "ray, or leave 'engine.python' out"
        )
    component = plugins.resolve("engine", name)
    python = find_interpreter(config.engine.python, component, [package_of(accelerator)])
    return _with_options("engine", component, options), python


def _check_devices(config: RunConfig, backend: Chosen) -> None:
    devices, component = config.trainer_devices, backend.component
    if devices.world_size > 1 and DISTRIBUTED not in component.capabilities:
        raise ConfigError(
            f"'resources.train' asks for {devices.world_size} devices and the backend {component.name!r} trains on "
            "one; ask for one, or use a backend for many, such as fsdp2"
        )
    if devices.world_size > 1 and _cluster_name(config) == INLINE:
        why = "AREAL_DEBUG_MODE asks for" if env.debug_mode() else "the recipe names"
        raise ConfigError(
            f"'resources.train' asks for {devices.world_size} devices, one process each, and {why} the cluster "
            f"{INLINE!r}, which is one process; ask for one device, or use cluster ray"
        )
    if isinstance(backend.options, DistributedOptions) and (
        problem := backend.options.problem(devices, config.model, config.training)
    ):
        raise ConfigError(f"backend {component.name!r}: {problem}")


def _check_sharing(config: RunConfig, plugins: Plugins, **chosen: Component) -> None:
    for kind, component in chosen.items() if config.resources.shared else ():
        if OFFLOAD not in component.capabilities:
            offered = [offer.component for offers in plugins.offers(kind).values() for offer in offers]
            able = sorted({each.name for each in offered if OFFLOAD in each.capabilities})
            raise ConfigError(
                f"'resources.shared' asks the {kind} to give its memory away and {component.name!r} cannot; use "
                f"{kind} {' or '.join(able)}, or leave 'resources.shared' out"
            )


def _check_group_size(config: RunConfig, options: Any) -> None:
    name, size = config.algorithm.name, config.algorithm.group_size
    if isinstance(options, AlgorithmOptions) and size < options.least_group_size:
        raise ConfigError(
            f"'algorithm.group_size' is {size} and {name!r}, as it is set, compares at least "
            f"{options.least_group_size} samples of a prompt; raise it, or take an algorithm without comparison, such "
            "as reinforce"
        )


def _cluster_name(config: RunConfig) -> str:
    if env.debug_mode():
        return INLINE
    return "ray" if config.cluster.name == AUTO else config.cluster.name


def _accelerator(name: str, plugins: Plugins) -> Accelerator:
    if name == AUTO:
        name = plugins.ask("areal_detect_accelerator") or "cpu"
    chosen = choose(plugins, "accelerator", name, {})
    accelerator: Accelerator = chosen.component.load()(chosen.options)
    if not accelerator.is_available():
        raise ConfigError(f"device {name!r} was asked for and this machine has none; use device=auto, or areal doctor")
    return accelerator
