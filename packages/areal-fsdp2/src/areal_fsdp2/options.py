"""What a recipe may say about the backend, and which combinations can run; light, read with every recipe."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from areal.contracts.backend import DistributedOptions
from areal.contracts.options import Options
from areal.contracts.specs import ModelSpec, TrainerDevices, TrainingSpec
from areal_fsdp2.dimensions import Dimensions
from areal_fsdp2.limits import Shape, chosen, problem_of, shape_of


class LoraOptions(Options):
    """LoRA (Hu et al., arXiv 2106.09685). Invariant: the weights of the model's folder never change."""

    rank: PositiveInt = 16
    """Inner size of the trained factors."""
    alpha: PositiveFloat = 32.0
    """W + (alpha / rank) B A."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last parts of the names of the linear layers that get factors."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engines get: whole weights, or the factors alone, for an engine that serves LoRA adapters."""


class Fsdp2Options(DistributedOptions):
    """Invariant: the options change how the work is spread, never the update, beyond floating-point rounding."""

    tp: NonNegativeInt = 0
    """Ranks that hold slices of each layer; 0: what `resources.train.parallel` (or `parallel.other`) says."""
    sp: PositiveInt = 1
    """Ranks that hold parts of each sequence, exchanged around attention (Ulysses, arXiv 2309.14509)."""
    pp: NonNegativeInt = 0
    """Ranks that hold runs of layers; 0: what `resources.train.parallel` says."""
    ep: NonNegativeInt = 0
    """Ranks that share the experts of a layer out; 0: what `parallel.expert` says."""
    replicate: PositiveInt = 1
    """Copies of the sharded weights (hybrid sharding): each is sharded over data-parallel ranks / `replicate`."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""
    cpu_offload: bool = False
    """Weights, gradients and moments rest in the host's memory, and the update is made there."""
    overlap_update: bool = True
    """An update in the host's memory goes on beside the next work, which waits for each layer's weights only."""
    record_collectives: str = ""
    """A folder where each rank writes in which order it has begun its last collectives; empty: nowhere."""

    lora: LoraOptions | None = None
    """Train LoRA factors in place of all weights (extra ``lora``); with data and sequence parallelism only."""

    def problem(self, devices: TrainerDevices, model: ModelSpec, training: TrainingSpec) -> str:
        """Return why this cannot run, with the nearest values that can; empty: it can."""
        shape = shape_of(model)
        wanted = self._wanted(devices, model, shape)
        if why := problem_of(wanted, devices.world_size, shape, lora=self.lora is not None):
            return why
        if self.lora is not None and find_spec("peft") is None:
            return "lora needs the package peft, which is not installed; run: pip install 'areal-fsdp2[lora]'"
        return ""

    def dimensions(self, devices: TrainerDevices, model: ModelSpec) -> Dimensions:
        """Return the sizes of the mesh; only where `problem` has nothing to say."""
        wanted = self._wanted(devices, model, shape_of(model))
        shard = devices.world_size // (wanted.tp * wanted.sp * wanted.pp * wanted.replicate)
        return Dimensions(
            pp=wanted.pp, replicate=wanted.replicate, shard=shard, sp=wanted.sp, tp=wanted.tp, ep=wanted.ep
        )

    def _wanted(self, devices: TrainerDevices, model: ModelSpec, shape: Shape | None) -> Dimensions:
        """Return what the recipe asks for; `shard` is left open (1)."""
        said = Dimensions(pp=self.pp, replicate=self.replicate, sp=self.sp, tp=self.tp, ep=self.ep)
        is_moe = model.type == "moe" or (shape is not None and shape.experts > 0)
        return chosen(said, devices, shape, is_moe=is_moe)
