"""Which meshes a model can be spread over: read from its configuration, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from areal.contracts.specs import ModelSpec, TrainerDevices
from areal_fsdp2.dimensions import Dimensions

PLANNED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types that tensor parallelism has a plan for."""
STAGED = PLANNED
"""Model types that can be cut into pipeline stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that a mesh must divide. Invariant: 0 where the configuration does not say."""

    type: str
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    intermediate: int = 0
    experts: int = 0


TINY = Shape(type="qwen3", layers=3, heads=4, kv_heads=2, vocab=100, intermediate=288)
"""The model that an empty ``model.path`` stands for."""


def shape_of(model: ModelSpec) -> Shape | None:
    """Return the sizes of a model; None for one that is not a folder here, or whose config.json cannot be read."""
    if not model.path:
        return TINY
    try:
        config: Any = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        config |= config.get("text_config") or {}
    except (OSError, ValueError, TypeError, AttributeError):  # loading it says what is wrong
        return None

    def size(*names: str) -> int:
        # Some families have a list, a number for each layer.
        return next((config[name] for name in names if isinstance(config.get(name), int) and config[name]), 0)

    heads = size("num_attention_heads", "n_head")
    return Shape(
        type=str(config.get("model_type", "")),
        layers=size("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        vocab=size("vocab_size"),
        intermediate=size("intermediate_size", "n_inner"),
        experts=size("num_experts", "num_local_experts", "n_routed_experts"),
    )


def chosen(said: Dimensions, devices: TrainerDevices, shape: Shape | None, *, is_moe: bool) -> Dimensions:
    """Fill in sizes that the options leave open (0) from what the recipe says about parallelism."""
    way = devices.layers.other if is_moe else devices.parallel
    rest = max(1, devices.world_size // (said.sp * said.replicate * max(1, said.tp) * max(1, said.pp)))
    tp, pp = said.tp or 1, said.pp or 1
    if said.tp == 0 and way == "tp":
        tp = _slices_beside_experts(rest, said.ep, shape) if is_moe else rest
    elif said.pp == 0 and way == "pp":
        pp = rest
    shard = max(1, devices.world_size // (tp * pp * said.sp * said.replicate))
    shares = gcd(shard, shape.experts // tp) if shape is not None and shape.experts else shard
    return replace(said, tp=tp, pp=pp, ep=said.ep or (shares if is_moe and devices.layers.expert == "dp" else 1))


def _slices_beside_experts(ranks: int, ep: int, shape: Shape | None) -> int:
    """Return the most slices that leave at least as many data ranks, to share experts out over."""
    whole = 0 if shape is None else gcd(shape.kv_heads, shape.experts)
    fits = [t for t in divisors(ranks) if t * t <= ranks and whole % t == 0 and ranks // t % max(1, ep) == 0]
    return max(fits, default=1)


def problem_of(wanted: Dimensions, world: int, shape: Shape | None) -> str:
    """Return why `world` ranks cannot be laid out so (`wanted.shard` is open), with the nearest values that can."""
    return next(_problems(wanted, world, shape), "")


def _problems(wanted: Dimensions, world: int, shape: Shape | None) -> Iterator[str]:
    product = wanted.tp * wanted.sp * wanted.pp
    if world % product:
        yield (
            f"tp {wanted.tp} x sp {wanted.sp} x pp {wanted.pp} = {product} does not divide the {world} devices of the "
            f"trainer; use {_nearest_products(wanted, world)}"
        )
        return
    dp = world // product
    if dp % wanted.replicate:
        use = _near(wanted.replicate, dp)
        yield f"replicate {wanted.replicate} does not divide the {dp} data-parallel ranks; use {use}"
    if (alike := dp // wanted.replicate) % wanted.ep:
        ranks = "data-parallel ranks" + (" of a copy" if wanted.replicate > 1 else "")
        yield f"ep {wanted.ep} does not divide the {alike} {ranks}; use {_near(wanted.ep, alike)}"
    if shape is not None:
        yield from _misfits(wanted, shape)


def _misfits(wanted: Dimensions, shape: Shape) -> Iterator[str]:
    """Yield what the model itself does not allow."""
    if wanted.tp > 1 and shape.type not in PLANNED:
        yield (
            f"tp {wanted.tp} needs a plan for the model type {shape.type!r} and there is one for "
            f"{', '.join(PLANNED)}; use tp 1"
        )
    if wanted.pp > 1 and shape.type not in STAGED:
        yield f"pp {wanted.pp} can cut {', '.join(STAGED)}, not the model type {shape.type!r}; use pp 1"
    for name, size in (("vocabulary", shape.vocab), ("intermediate size", shape.intermediate)):
        if size % wanted.tp:
            yield f"tp {wanted.tp} does not divide the model's {name} {size}; use {_near(wanted.tp, size)}"
    for name, size in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        if size % wanted.tp:
            yield f"tp {wanted.tp} does not divide the model's {size} {name}; use {_near(wanted.tp, size)}"
            return
    heads, kv_heads = shape.heads // wanted.tp, shape.kv_heads // wanted.tp
    if heads % wanted.sp or (kv_heads and kv_heads % wanted.sp and wanted.sp % kv_heads):
        fits = [d for d in divisors(heads) if kv_heads % d == 0 or d % kv_heads == 0]
        yield (
            f"sp {wanted.sp} does not divide the {heads} attention heads of each rank, or does not fit its {kv_heads} "
            f"key-value heads; use {_next_to(wanted.sp, fits)}"
        )
    if wanted.pp > shape.layers > 0:
        yield f"pp {wanted.pp} is more than the model's {shape.layers} layers; use at most pp {shape.layers}"
    if wanted.ep > 1 and not shape.experts:
        yield f"ep {wanted.ep} shares experts out and the model type {shape.type!r} has none; use ep 1"
    elif shape.experts % (wanted.ep * wanted.tp):
        # Ranks that hold slices share the experts out too.
        shares = f"ep {wanted.ep}" if wanted.tp == 1 else f"ep {wanted.ep} x tp {wanted.tp} = {wanted.ep * wanted.tp}"
        fits = [d for d in divisors(shape.experts) if shape.experts % (d * wanted.tp) == 0]
        use = f"ep {_next_to(wanted.ep, fits)}" if fits else f"tp {_near(wanted.tp, shape.experts)}"
        yield f"{shares} does not divide the model's {shape.experts} experts; use {use}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _near(asked: int, number: int) -> str:
    """Return in words the divisors next to `asked`, below and above."""
    return _next_to(asked, divisors(number))


def _next_to(asked: int, known: list[int]) -> str:
    below, above = [d for d in known if d <= asked], [d for d in known if d > asked]
    return " or ".join(str(d) for d in (*below[-1:], *above[:1]))


def _nearest_products(wanted: Dimensions, world: int) -> str:
    """Return in words the sizes that fit, changing as little as can be: the first of them that another value heals."""
    sizes = {"tp": wanted.tp, "sp": wanted.sp, "pp": wanted.pp}
    for name, size in sizes.items():
        others = wanted.tp * wanted.sp * wanted.pp // size
        if size > 1 and world % others == 0:
            return f"{name} {_near(size, world // others)}"
    return f"a product of {_near(wanted.tp * wanted.sp * wanted.pp, world)}"
