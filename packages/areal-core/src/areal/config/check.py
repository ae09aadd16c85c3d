"""Combinations that cannot run, each refused with the nearest value that can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from areal.config.schema import AUTO, DeviceGroup, RunConfig
from areal.contracts.hf_config import EXPERTS_OF_A_TOKEN, NUM_EXPERTS, hf_config, size_of
from areal.contracts.specs import ModelSpec
from areal.errors import did_you_mean

Problem = tuple[tuple[str | int, ...], str]
"""Path of the value to change, and one sentence that says why and to what."""


def problems(config: RunConfig) -> Iterator[Problem]:
    """Yield everything in a recipe that cannot run as it is combined."""
    yield from _training(config)
    yield from _precision(config)
    yield from _model(config)
    yield from _devices(config)
    yield from _sharing(config)
    yield from _bounds(config)
    yield from _patience(config)
    yield from _mixture(config)
    yield from _sampling(config)
    yield from _names(config)


def _training(config: RunConfig) -> Iterator[Problem]:
    training = config.training
    prompts, parts = training.batch_size, training.minibatches
    if prompts % parts:
        # Of two divisors at the same distance, the one with larger mini-batches.
        nearest = min((n for n in range(1, prompts + 1) if prompts % n == 0), key=lambda n: abs(n - parts))
        yield (
            ("training", "minibatches"),
            f"'training.minibatches' {parts} does not divide 'training.batch_size' {prompts}; nearest: {nearest}",
        )


def _precision(config: RunConfig) -> Iterator[Problem]:
    amp = config.training.amp
    if amp.enabled and amp.dtype == "bf16" and amp.loss_scale != "dynamic":
        yield (
            ("training", "amp", "loss_scale"),
            f"'training.amp.loss_scale' {amp.loss_scale:g} is for dtype fp16; remove it, or set dtype: fp16",
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.type == "dense":
        for key in ("num_experts", "top_k"):
            if given := getattr(model, key):
                yield ("model", key), f"'model.{key}' {given} is for mixtures of experts; set 'model.type': moe"
        return
    if model.num_experts and model.top_k > model.num_experts:
        yield (
            ("model", "top_k"),
            f"'model.top_k' {model.top_k} is more than 'model.num_experts' {model.num_experts}; "
            f"nearest: {model.num_experts}",
        )
    if not model.path and not (model.num_experts and model.top_k):
        yield (
            ("model", "type"),
            "'model.type' moe without a 'model.path' needs 'model.num_experts' and 'model.top_k', for example 4 and 2",
        )
    if model.path and (said := hf_config(model.path)) is not None:
        yield from _experts(model, said)


def _experts(model: ModelSpec, said: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what of a mixture of experts is not what the model's configuration says; 0: it does not say."""
    there = {"num_experts": size_of(said, *NUM_EXPERTS), "top_k": size_of(said, *EXPERTS_OF_A_TOKEN)}
    if not any(there.values()):
        yield (
            ("model", "type"),
            f"'model.type' is moe and the model in {model.path!r} has no experts; set 'model.type': dense, or take "
            "another 'model.path'",
        )
    for key, size in there.items():
        if size and (given := getattr(model, key)) not in (0, size):
            yield (
                ("model", key),
                f"'model.{key}' is {given} and the model in {model.path!r} has {size}; nearest: {size}",
            )


def _devices(config: RunConfig) -> Iterator[Problem]:
    yield from _group("train", config.resources.train)
    yield from _group("infer", config.resources.infer)
    replicas, devices = config.engine.replicas, config.resources.infer.total
    given = config.resources.infer.num_gpus or config.resources.infer.gpus_per_node
    if given and devices % replicas:
        nearest = min((n for n in range(1, devices + 1) if devices % n == 0), key=lambda n: abs(n - replicas))
        yield (
            ("engine", "replicas"),
            f"'engine.replicas' {replicas} cannot share {devices} devices of 'resources.infer' evenly; "
            f"nearest: {nearest}",
        )


def _sharing(config: RunConfig) -> Iterator[Problem]:
    if not config.resources.shared:
        return
    for side, group in (("train", config.resources.train), ("infer", config.resources.infer)):
        if group.total > 1:
            yield (
                ("resources", "shared"),
                f"'resources.shared' is for one device and 'resources.{side}' asks for {group.total}; ask for one, or "
                "leave 'resources.shared' out",
            )
            return
    if config.engine.replicas > 1:
        yield (
            ("engine", "replicas"),
            f"'resources.shared' is for one engine and 'engine.replicas' is {config.engine.replicas}; nearest: 1",
        )


def _bounds(config: RunConfig) -> Iterator[Problem]:
    for block, key, number in (
        ("engine", "replicas", config.engine.replicas),
        ("rollout", "workers", config.rollout.workers),
    ):
        choice = config.engine if block == "engine" else config.rollout
        if choice.min > choice.max:
            yield (
                (block, "min"),
                f"'{block}.min' {choice.min} is more than '{block}.max' {choice.max}; nearest: {choice.max}",
            )
        elif not choice.min <= number <= choice.max:
            yield (
                (block, key),
                f"'{block}.{key}' {number} must lie between '{block}.min' {choice.min} and '{block}.max' "
                f"{choice.max}; nearest: {min(max(number, choice.min), choice.max)}",
            )


def _patience(config: RunConfig) -> Iterator[Problem]:
    episode_s, quiet_s = config.rollout.episode_timeout_s, config.failures.quiet_time_s
    if 0 < quiet_s < episode_s:
        yield (
            ("failures", "quiet_time_s"),
            f"'failures.quiet_time_s' {quiet_s:g} is shorter than an episode may take "
            f"('rollout.episode_timeout_s' {episode_s:g}); nearest: {episode_s:g}, or 0 for twice as long",
        )


def _group(side: str, group: DeviceGroup) -> Iterator[Problem]:
    path = ("resources", side, "num_gpus")
    nodes, per_node = group.num_nodes, group.gpus_per_node
    if not group.num_gpus:
        return
    if per_node and nodes * per_node != group.num_gpus:
        yield (
            path,
            f"'resources.{side}.num_gpus' {group.num_gpus} contradicts {nodes} nodes with {per_node} each; "
            f"give {nodes * per_node}, or leave it out",
        )
    elif group.num_gpus % nodes:
        nearest = max(nodes, round(group.num_gpus / nodes) * nodes)
        yield (
            path,
            f"'resources.{side}.num_gpus' {group.num_gpus} cannot be spread evenly over {nodes} nodes; "
            f"nearest: {nearest}",
        )


def _mixture(config: RunConfig) -> Iterator[Problem]:
    if not config.environments:
        yield ("environments",), "'environments' is empty; name at least one, for example {type: reverse_digits}"
        return
    counts = Counter(environment.name for environment in config.environments)
    for index, environment in enumerate(config.environments):
        if counts[environment.name] > 1:
            yield (
                ("environments", index, "name"),
                f"{counts[environment.name]} environments are named {environment.name!r}; give each its own 'name'",
            )
            break
    if not any(environment.weight for environment in config.environments):
        yield ("environments", 0, "weight"), "every environment has weight 0; give at least one a weight above 0"


def _sampling(config: RunConfig) -> Iterator[Problem]:
    size = config.algorithm.group_size
    if config.sampling.temperature == 0 and size > 1:
        yield (
            ("sampling", "temperature"),
            f"'sampling.temperature' 0 makes the {size} samples of a prompt equal, so nothing can be learned; "
            "nearest: 1.0, or 'algorithm.group_size' 1",
        )


def _names(config: RunConfig) -> Iterator[Problem]:
    if config.name in (".", "..") or any(letter in config.name for letter in "/\\\0"):
        safe = "-".join(part for part in config.name.replace("\\", "/").replace("\0", "/").split("/") if part)
        yield ("name",), f"'name' {config.name!r} cannot be a folder's name; nearest: {safe.strip('.') or 'run'!r}"
    for key, choice in (("reshard", config.reshard), ("cluster", config.cluster)):
        if choice.name == AUTO and choice.options:
            option = next(iter(choice.options))
            hint = did_you_mean(option, type(choice).model_fields) or "; name one"
            yield (key, option), f"'{key}.{option}' is an option of a component, but '{key}.name' is auto{hint}"
    counts = Counter(tracker.name for tracker in config.trackers)
    for index, tracker in enumerate(config.trackers):
        if counts[tracker.name] > 1:
            yield ("trackers", index), f"tracker {tracker.name!r} stands {counts[tracker.name]} times; keep one"
            break
