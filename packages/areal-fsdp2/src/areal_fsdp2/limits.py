"""Which meshes a model can be spread over: read from its configuration, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd, log

from areal.contracts.hf_config import NUM_EXPERTS, hf_config, size_of
from areal.contracts.specs import ModelSpec, TrainerDevices
from areal_fsdp2.dimensions import Dimensions

PLANNED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types that tensor parallelism has a plan for."""
STAGED = PLANNED
"""Model types that can be cut into pipeline stages."""
SIZES = ("tp", "sp", "pp", "replicate", "ep")
"""What a recipe may say of the mesh."""


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
"""The model that an empty ``model.path`` stands for, if it has no experts."""


def shape_of(model: ModelSpec) -> Shape | None:
    """Return the sizes of a model; None for one that is not a folder here, or whose config.json cannot be read."""
    if not model.path:
        is_moe = model.type == "moe"
        return replace(TINY, type="qwen3_moe", experts=model.num_experts) if is_moe else TINY
    config = hf_config(model.path)
    if config is None:
        return None
    size = partial(size_of, config)
    heads = size("num_attention_heads", "n_head")
    return Shape(
        type=str(config.get("model_type", "")),
        layers=size("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        vocab=size("vocab_size"),
        intermediate=size("intermediate_size", "n_inner"),
        experts=size(*NUM_EXPERTS),
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


def problem_of(wanted: Dimensions, world: int, shape: Shape | None, *, lora: bool = False) -> str:
    """Return why `world` ranks cannot be laid out so (`wanted.shard` is open), with the nearest values that can."""
    for names, why in _problems(wanted, world, shape, lora=lora):
        fitting = partial(_fits, world=world, shape=shape, lora=lora)
        use = _nearest_size(wanted, world, names, fitting) or _nearest_mesh(wanted, world, fitting)
        return f"{why}; use {use}"
    return ""


Problem = tuple[tuple[str, ...], str]
"""Sizes of which another value may do, and what is wrong."""


def _fits(wanted: Dimensions, *, world: int, shape: Shape | None, lora: bool) -> bool:
    return next(_problems(wanted, world, shape, lora=lora), None) is None


def _problems(wanted: Dimensions, world: int, shape: Shape | None, *, lora: bool) -> Iterator[Problem]:
    cut = wanted.tp * wanted.sp * wanted.pp
    if world % cut:
        names = tuple(name for name in ("tp", "sp", "pp") if getattr(wanted, name) > 1)
        asked = f"tp {wanted.tp} x sp {wanted.sp} x pp {wanted.pp} = {cut}"
        yield names, f"{asked} does not divide the {world} devices of the trainer"
        return
    dp = world // cut
    if dp % wanted.replicate:
        yield ("replicate",), f"replicate {wanted.replicate} does not divide the {dp} data-parallel ranks"
    elif (alike := dp // wanted.replicate) % wanted.ep:
        ranks = "data-parallel ranks" + (" of a copy" if wanted.replicate > 1 else "")
        yield ("ep",), f"ep {wanted.ep} does not divide the {alike} {ranks}"
    if shape is not None:
        yield from _misfits(wanted, shape)
    if lora and (others := [name for name in ("tp", "pp", "ep") if getattr(wanted, name) > 1]):
        asked = ", ".join(f"{name} {getattr(wanted, name)}" for name in others)
        yield tuple(others), f"lora trains with dp and sp and not with {asked}"


def _misfits(wanted: Dimensions, shape: Shape) -> Iterator[Problem]:
    """Yield what the model itself does not allow."""
    if wanted.tp > 1 and shape.type not in PLANNED:
        plans = ", ".join(PLANNED)
        yield ("tp",), f"tp {wanted.tp} needs a plan for the model type {shape.type!r} and there is one for {plans}"
    if wanted.pp > 1 and shape.type not in STAGED:
        yield ("pp",), f"pp {wanted.pp} can cut {', '.join(STAGED)}, not the model type {shape.type!r}"
    for name, size in (("vocabulary", shape.vocab), ("intermediate size", shape.intermediate)):
        if size % wanted.tp:
            yield ("tp",), f"tp {wanted.tp} does not divide the model's {name} {size}"
    for name, size in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        if size % wanted.tp:
            yield ("tp",), f"tp {wanted.tp} does not divide the model's {size} {name}"
            return
    heads, kv_heads = shape.heads // wanted.tp, shape.kv_heads // wanted.tp
    if heads % wanted.sp or (kv_heads and kv_heads % wanted.sp and wanted.sp % kv_heads):
        limit = f"the {heads} attention heads of each rank, or does not fit its {kv_heads} key-value heads"
        yield ("sp",), f"sp {wanted.sp} does not divide {limit}"
    if wanted.pp > shape.layers > 0:
        yield ("pp",), f"pp {wanted.pp} is more than the model's {shape.layers} layers"
    if wanted.ep > 1 and not shape.experts:
        yield ("ep",), f"ep {wanted.ep} shares experts out and the model type {shape.type!r} has none"
    elif shape.experts % (wanted.ep * wanted.tp):
        # Ranks that hold slices share the experts out too.
        shares = f"ep {wanted.ep}" if wanted.tp == 1 else f"ep {wanted.ep} x tp {wanted.tp} = {wanted.ep * wanted.tp}"
        yield ("ep", "tp"), f"{shares} does not divide the model's {shape.experts} experts"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


Fitting = Callable[[Dimensions], bool]


def _nearest_size(wanted: Dimensions, world: int, names: tuple[str, ...], fits: Fitting) -> str:
    """Return in words the values below and above of the first of `names` that alone can make it fit; empty: none."""
    for name in names:
        known = [size for size in divisors(world) if fits(replace(wanted, **{name: size}))]
        asked = getattr(wanted, name)
        near = [*[size for size in known if size < asked][-1:], *[size for size in known if size > asked][:1]]
        if near:
            return f"{name} " + " or ".join(map(str, near))
    return ""


def _nearest_mesh(wanted: Dimensions, world: int, fits: Fitting) -> str:
    """Return in words what to change of several sizes: as few as can be, by the smallest factors."""

    def changes(mesh: Dimensions) -> dict[str, float]:
        pairs = {name: (getattr(mesh, name), getattr(wanted, name)) for name in SIZES}
        return {name: abs(log(new / old)) for name, (new, old) in pairs.items() if new != old}

    def distance(mesh: Dimensions) -> tuple[int, float]:
        factors = changes(mesh).values()
        return len(factors), sum(factors)

    nearest = min(filter(fits, _meshes(wanted, world)), key=distance)
    return " and ".join(f"{name} {getattr(nearest, name)}" for name in changes(nearest))


def _meshes(wanted: Dimensions, world: int) -> Iterator[Dimensions]:
    """Yield what could be; with all sizes 1, which is among them, every model fits."""
    for tp in divisors(world):
        for sp in divisors(world // tp):
            for pp in divisors(world // tp // sp):
                for replicate, ep in product({1, wanted.replicate}, {1, wanted.ep}):
                    yield replace(wanted, tp=tp, sp=sp, pp=pp, replicate=replicate, ep=ep)
